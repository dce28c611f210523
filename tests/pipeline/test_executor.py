"""What the executor holds on to, and in which order things happen."""

import gc
import weakref

import pytest
import torch
from support import boosted, sgd
from torch import nn

from hybridpp.cluster import Loopback, current_world
from hybridpp.pipeline import Executor, Microbatch, PipelineStep, Transport, rank_programs
from hybridpp.schedule import Action, ActionKind, forward_only, one_f_one_b


class _Held:
    """Something that lives as long as the graph that holds it."""


class _Probe(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, alive, peaks):
        ctx.held = _Held()
        alive.add(ctx.held)
        peaks.append(len(alive))
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient, None, None


class Counting(nn.Module):
    """A block that knows for how many micro-batches its graph is alive."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.alive = weakref.WeakSet()
        self.peaks = []

    def forward(self, x):
        return _Probe.apply(self.layer(x), self.alive, self.peaks) if self.training else self.layer(x)


def squares(outputs, inputs):
    return outputs.square().mean()


@pytest.mark.parametrize("num_stages", [1, 2, 4])
@pytest.mark.parametrize("num_microbatches", [1, 2, 4, 9])
def test_1f1b_keeps_the_activations_of_at_most_p_minus_s_microbatches(num_stages, num_microbatches):
    data = torch.ones(num_microbatches, 4)

    def run():
        torch.manual_seed(0)
        model = nn.Sequential(*[Counting() for _ in range(num_stages)])
        booster, model, optimizer = boosted(
            model.eval(), sgd, data, pp_size=num_stages, num_microbatches=num_microbatches
        )
        model.train()
        mine = model[current_world().rank]
        mine.peaks.clear()
        booster.execute_pipeline(iter([data]), model, squares, optimizer)
        if mine.alive:  # in cycles, perhaps
            gc.collect()
        assert not mine.alive, "everything is freed when the step ends"
        return max(mine.peaks[-num_microbatches:])

    peaks = Loopback(num_stages).run(run)
    assert peaks == [min(num_microbatches, num_stages - stage) for stage in range(num_stages)]


class Recorded:
    """A stage that computes nothing much and writes down what it was asked."""

    def __init__(self, stage, num_stages):
        self.stage, self.is_last = stage, stage == num_stages - 1
        self.log = []
        spec = type("Spec", (), {"shape": (1,), "dtype": torch.float32, "requires_grad": True})()
        self.incoming_specs = [] if stage == 0 else [spec]
        self.outgoing_specs = [] if self.is_last else [spec]
        self.weight = torch.ones(1, requires_grad=True)

    def plans(self, args, kwargs):
        return {self.stage: self}

    def forward(self, plan, args, kwargs, received, key, recompute):
        self.log.append(("F", key, received[0].item() if received else None))
        value = (received[0] if received else args[0]) * self.weight + 1
        return ([], value, key) if self.is_last else ([value], None, key)

    def recomputing(self, key):
        from contextlib import nullcontext

        self.log.append(("B", key))
        return nullcontext()


def run_recorded(num_stages, num_microbatches, training, fail_at=None):
    def run():
        world = current_world()
        ranks = [list(range(num_stages))]
        stage = Recorded(world.rank, num_stages)
        executor = Executor(stage, Transport(world.split(ranks), world.device), world.device)
        programs = one_f_one_b(num_stages, num_microbatches)
        if not training:
            programs = forward_only(range(num_stages), num_microbatches)
        program = rank_programs(programs)[world.rank]
        calls = []

        def criterion(outputs, inputs):
            if inputs.item() == fail_at:
                raise ValueError("no")
            return outputs.sum()

        step = PipelineStep(
            microbatches=[Microbatch(torch.full((1,), float(n)), 1, 1.0) for n in range(num_microbatches)],
            loss_weights=[1.0] * num_microbatches,
            keys=list(range(num_microbatches)),
            criterion=criterion,
            training=training,
            keep_outputs=True,
            begin_last_backward=lambda stage_index, pending: calls.append(len(stage.log)),
            end_backward=lambda: None,
            reduce_gradients=lambda stage_index: calls.append(len(stage.log)),
        )
        result = executor.run(program, step)
        assert executor.where is None
        gradient = None if stage.weight.grad is None else stage.weight.grad.item()
        return (
            stage.log,
            calls,
            {n: float(result.losses[n]) for n, there in enumerate(result.has_loss) if there},
            gradient,
        )

    return Loopback(num_stages).run(run)


def test_microbatches_pass_through_the_stages_and_gradients_come_back():
    (first, calls, no_losses, gradient), (last, _, losses, _) = run_recorded(2, 3, training=True)
    assert [entry[:2] for entry in first] == [("F", 0), ("F", 1), ("B", 0), ("F", 2), ("B", 1), ("B", 2)]
    assert [entry for entry in last if entry[0] == "F"] == [("F", 0, 1.0), ("F", 1, 2.0), ("F", 2, 3.0)]
    assert no_losses == {}
    assert losses == {0: 2.0, 1: 3.0, 2: 4.0}
    assert gradient == 0 + 1 + 2
    assert calls == [5, 6], "told before the last backward and after it"


def test_forward_only_runs_no_backward():
    (first, calls, _, gradient), (last, *_) = run_recorded(2, 3, training=False)
    assert [entry[0] for entry in (*first, *last)] == ["F"] * 6
    assert calls == []
    assert gradient is None


def test_an_error_says_in_which_action_it_happened():
    with pytest.raises(ValueError, match="no") as raised:
        run_recorded(2, 3, training=True, fail_at=1.0)
    assert (
        f"hybridpp: in action {Action(1, ActionKind.FORWARD, 1)} (stage, kind, micro-batch)" in raised.value.__notes__
    )
