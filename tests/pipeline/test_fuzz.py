"""Plans with something wrong in them: the checker says that they run exactly if they do."""

import random
from contextlib import nullcontext
from itertools import product
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from hybridpp.cluster import Loopback, current_world
from hybridpp.errors import ScheduleError
from hybridpp.module_adapter import ModuleAdapter
from hybridpp.pipeline import (
    Executor,
    Microbatch,
    PipelineStep,
    RankProgram,
    Transport,
    WeightGradients,
    rank_programs,
)
from hybridpp.schedule import (
    SCHEDULES,
    Action,
    ActionKind,
    check_program,
    forward_only,
    lower,
    make_schedule,
    placement,
    stages_placement,
)

COMPUTES = [kind for kind in ActionKind if kind.computes]
SPEC = SimpleNamespace(shape=(1, 1), dtype=torch.float32, requires_grad=True)
# Micro-batch n's part of every gradient is 8**n, so that a sum tells how often each of them is in it.
BASE = 8


def plans():
    """(number of stages, number of micro-batches, programs) of every schedule, small."""
    for name, entry in SCHEDULES.items():
        for p in (1, 2, 3):
            for m in (1, 2, 4):
                for v in (1, 2) if entry.takes_chunks else [entry.num_chunks]:
                    yield p * v, m, make_schedule(name, p, m, v)
                    if name == "zb-v" or entry.takes_chunks:
                        yield p * v, m, forward_only(stages_placement(name, p, v), m)


def mutated(programs, num_stages, num_microbatches, dice):
    """Programs with one thing changed at random."""
    rows = [list(row) for row in programs]
    row = dice.choice([row for row in rows if row])
    place = dice.randrange(len(row))
    action = row[place]
    match dice.choice(["swap", "neighbours", "move", "elsewhere", "delete", "repeat", "split", "kind", "name"]):
        case "swap":
            other = dice.randrange(len(row))
            row[place], row[other] = row[other], row[place]
        case "neighbours":
            other = max(0, place - 1)
            row[place], row[other] = row[other], row[place]
        case "move":
            row.insert(dice.randrange(len(row)), row.pop(place))
        case "elsewhere":
            del row[place]
            target = dice.choice(rows)
            target.insert(dice.randint(0, len(target)), action)
        case "delete":
            del row[place]
        case "repeat":
            row.insert(dice.randint(0, len(row)), action)
        case "split" if action.kind is ActionKind.BACKWARD:
            row[place] = action._replace(kind=ActionKind.INPUT_GRADIENT)
            row.insert(dice.randint(place, len(row)), action._replace(kind=ActionKind.WEIGHT_GRADIENT))
        case "kind":
            row[place] = action._replace(kind=dice.choice(COMPUTES))
        case _:
            row[place] = Action(dice.randrange(num_stages + 1), action.kind, dice.randrange(num_microbatches + 1))
    return tuple(map(tuple, rows))


class Answered:
    """A group whose sends are over when the peer has asked for the message, as those of large tensors may be."""

    def __init__(self, world):
        everyone = [list(range(world.size))]
        self._messages, self._answers = world.split(everyone), world.split(everyone)
        self.rank = self._messages.rank

    def send(self, tensor, peer):
        self._messages.send(tensor, peer)
        return self._answers.receive(torch.empty(1), peer)

    def receive(self, tensor, peer):
        self._answers.send(torch.empty(1), peer)
        return self._messages.receive(tensor, peer)


class Scales:
    """A rank's stages: each multiplies by a weight, which is 1."""

    def __init__(self, num_stages):
        self.num_stages = num_stages
        self.layers = nn.ModuleList(nn.Linear(1, 1, bias=False) for _ in range(num_stages))
        for weight in self.layers.parameters():
            nn.init.ones_(weight)
        self.weight_gradients = WeightGradients(ModuleAdapter(self.layers))
        for weight in self.layers.parameters():
            weight.grad = torch.zeros(1, 1)
        self.gradients = {name: weight.grad for name, weight in self.layers.named_parameters()}
        self.weight_gradients.attach_sink(self)
        self.forwards = []

    def defer(self, names):
        """A part of the gradient follows later: nothing to prepare."""

    def takes_products(self, name):
        """Gradients come complete."""
        return False

    def mark_reached(self, names):
        """Nothing else looks."""

    def add(self, name, gradient):
        self.gradients[name] += gradient

    def mark_complete(self, name):
        """Nothing else looks."""

    def plans(self, args, kwargs):
        return {
            stage: SimpleNamespace(
                stage=stage,
                is_last=stage == self.num_stages - 1,
                incoming_specs=[SPEC] if stage else [],
                outgoing_specs=[SPEC] if stage < self.num_stages - 1 else [],
            )
            for stage in range(self.num_stages)
        }

    def forward(self, plan, args, kwargs, received, key, recompute):
        self.forwards.append((plan.stage, key))
        value = self.layers[plan.stage](received[0] if received else args[0])
        return ([], value, None) if plan.is_last else ([value], None, None)

    def recomputing(self, context):
        return nullcontext()


def unchecked(programs):
    """What :func:`rank_programs` gives, as far as that can be told of programs that do not run."""
    return [RankProgram(row, ((),) * len(row), placement(programs), 0) for row in lower(programs)]


def on_rank(program, num_stages, num_microbatches, training):
    """Run one rank: its part of each stage's gradient, the outputs it has, and the forwards it did."""
    world = current_world()
    stages = Scales(num_stages)
    step = PipelineStep(
        microbatches=[Microbatch(torch.full((1, 1), float(BASE**n)), 1, 1.0) for n in range(num_microbatches)],
        loss_weights=[1.0] * num_microbatches,
        keys=list(range(num_microbatches)),
        criterion=lambda outputs, inputs: outputs.sum(),
        training=training,
        keep_outputs=True,
        begin_last_backward=lambda stage, names: False,
        end_backward=lambda: None,
        reduce_gradients=lambda stage: None,
    )
    executor = Executor(stages, Transport(Answered(world), world.device), world.device, stages.weight_gradients)
    with torch.set_grad_enabled(training):
        result = executor.run(program, step)
    return torch.stack([*stages.gradients.values()]).flatten(), result.outputs, stages.forwards


def what_goes_wrong(programs, num_stages, num_microbatches, make):
    """None if the programs run to their end, do everything once and give what they should."""
    training = any(action.kind is not ActionKind.FORWARD for row in programs for action in row)
    try:
        made = make(programs)
        ranks = Loopback(len(programs)).run(
            lambda: on_rank(made[current_world().rank], num_stages, num_microbatches, training)
        )
    except Exception as error:
        return repr(error)
    forwards = sorted(forward for _, _, forwards in ranks for forward in forwards)
    if forwards != list(product(range(num_stages), range(num_microbatches))):
        return f"forwards of {forwards}"
    parts = [BASE**n for n in range(num_microbatches)]
    outputs = {n: output.item() for _, outputs, _ in ranks for n, output in outputs.items()}
    if outputs != dict(enumerate(parts)):
        return f"outputs {outputs}"
    gradients = sum(gradients for gradients, _, _ in ranks).tolist()
    return None if gradients == [sum(parts) * training] * num_stages else f"gradients {gradients}"


def complaint(programs, num_stages, num_microbatches):
    """What the checker has against the programs, if anything."""
    try:
        check_program(programs, num_stages, num_microbatches)
    except ScheduleError as error:
        return str(error)
    return None


def test_every_plan_runs():
    for num_stages, num_microbatches, programs in plans():
        assert complaint(programs, num_stages, num_microbatches) is None
        assert what_goes_wrong(programs, num_stages, num_microbatches, rank_programs) is None


@pytest.mark.parametrize("seed", range(4))
def test_a_changed_plan_is_accepted_exactly_if_it_runs(seed):
    dice = random.Random(seed)
    originals = list(plans())
    accepted = refused = 0
    while accepted + refused < 400:
        num_stages, num_microbatches, programs = dice.choice(originals)
        for _ in range(dice.choice([1, 1, 1, 2, 3])):
            if any(programs):
                programs = mutated(programs, num_stages, num_microbatches, dice)
        complains = complaint(programs, num_stages, num_microbatches)
        make = rank_programs if complains is None else unchecked
        wrong = what_goes_wrong(programs, num_stages, num_microbatches, make)
        assert (complains is None) == (wrong is None), (programs, complains, wrong)
        accepted += complains is None
        refused += complains is not None
    assert min(accepted, refused) > 50, (accepted, refused)
