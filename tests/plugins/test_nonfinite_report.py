"""An inf or NaN, wherever it is put, is named: stage, micro-batch, module or parameter, rank."""

import math

import pytest
import torch
from nonfinite_ops import Through, spoilt
from support import assert_same, boosted, image_batch, model_loss, sgd, tiny_vit
from torch import nn

from hybridpp.cluster import Loopback
from hybridpp.errors import NonFiniteLossError

NUM_MICROBATCHES = 3
BATCH = image_batch(6)
MODULES = [
    "vit.embeddings.patch_embeddings.projection",
    "vit.layers.0.layernorm_before",
    "vit.layers.1.attention.q_proj",
    "vit.layers.2.attention",
    "vit.layers.2",
    "vit.layers.3.mlp.fc1",
    "vit.layernorm",
    "classifier",
]


class At:
    """Spoils one micro-batch's value, every time the step is run."""

    def __init__(self, microbatch, value):
        self.microbatch, self.value, self.num_calls = microbatch, value, 0

    def __call__(self, output):
        if isinstance(output, tuple):
            return (self(output[0]), *output[1:])
        return self.spoilt(output)

    def spoilt(self, tensor):
        mine = self.num_calls % NUM_MICROBATCHES == self.microbatch
        self.num_calls += 1
        if not mine:
            return tensor
        return spoilt(tensor, self.value)


def owned_by(model, name):
    """Whether this rank runs a module of the tiny ViT."""
    return any(parameter_name.startswith(f"{name}.") for parameter_name, _ in model.named_parameters())


def start(pp_size=2, **settings):
    settings = {"precision": "fp16", "num_microbatches": NUM_MICROBATCHES, "pp_size": pp_size, **settings}
    return boosted(tiny_vit(0.1), sgd, image_batch(2), **settings)


def spoil_output(model, name, spoil):
    if not owned_by(model, name):
        return None
    return model.get_submodule(name).register_forward_hook(lambda module, args, output: spoil(output))


def reports(spoilers, **settings):
    """What all ranks report, and which rank it was, of one step for each of ``spoilers``.

    Each is called with the model of every rank, and returns a handle where it has put something bad.
    """

    def run():
        booster, model, optimizer = start(**settings)
        optimizer.gradient_checks = None  # hooks spoil gradients on purpose
        booster.execute_pipeline(iter([BATCH]), model, model_loss, optimizer)
        rows = []
        for spoil in spoilers:
            optimizer.zero_grad()
            optimizer.loss_scaler.skipped_steps = 0
            handle = spoil(model)
            try:
                booster.execute_pipeline(iter([BATCH]), model, model_loss, optimizer)
                optimizer.step()
                text = optimizer.overflow_report
            except NonFiniteLossError as error:
                text = str(error).partition("The first inf or NaN: ")[2].partition(". Check")[0]
            rows.append((text, handle is not None))
            if handle is not None:
                handle.remove()
        return rows

    ranks = Loopback(2).run(run)
    for cases in zip(*ranks, strict=True):
        assert len({text for text, _ in cases}) == 1, "all ranks say the same"
        (owner,) = [rank for rank, (_, mine) in enumerate(cases) if mine]
        yield cases[0][0], owner


CASES = [(0, math.inf), (2, math.nan)]  # micro-batch and value


def named(value):
    return "NaN" if math.isnan(value) else "inf"


def test_activations():
    cases = [(name, *CASES[place % len(CASES)]) for place, name in enumerate(MODULES)]

    def spoiler(name, microbatch, value):
        return lambda model: spoil_output(model, name, At(microbatch, value))

    found = reports([spoiler(*case) for case in cases])
    for (name, microbatch, value), (text, rank) in zip(cases, found, strict=True):
        expected = (
            f"the output of '{name}' holds {named(value)} (stage {rank}, micro-batch {microbatch}) on rank {rank}"
        )
        assert text == expected


# Where the gradient is spoilt on its way to the input of a module, whose output that is, and on which rank.
MADE_BY = {
    "vit.layers.0.layernorm_before": ("vit.embeddings.dropout", 0),
    "vit.layers.1.attention.q_proj": ("vit.layers.1.layernorm_before", 0),
    "vit.layers.2": ("vit.layers.1", 0),
    "vit.layers.2.attention": ("vit.layers.2.layernorm_before", 1),
    "vit.layers.3.mlp.fc1": ("vit.layers.3.layernorm_after", 1),
    "vit.layernorm": ("vit.layers.3", 1),
    "classifier": ("vit.layernorm", 1),
}


@pytest.mark.parametrize(("schedule", "first"), [("1f1b", 0), ("zb-h1", 1)])
def test_gradients_on_their_way_back(schedule, first):
    cases = [(name, *CASES[(first + place) % len(CASES)]) for place, name in enumerate(MADE_BY)]

    def spoiler(name, microbatch, value):
        spoil = At(microbatch, value)

        def before(module, args, kwargs):
            return (Through.apply(args[0], spoil), *args[1:]), kwargs

        def put(model):
            here = owned_by(model, name)
            return model.get_submodule(name).register_forward_pre_hook(before, with_kwargs=True) if here else None

        return put

    found = reports([spoiler(*case) for case in cases], schedule=schedule)
    for (name, microbatch, value), (text, _) in zip(cases, found, strict=True):
        by, rank = MADE_BY[name]
        what = f"the gradient of the output of '{by}' holds {named(value)}"
        assert text == f"{what} (stage {rank}, micro-batch {microbatch}) on rank {rank}"


@pytest.mark.parametrize(("schedule", "first"), [("1f1b", 0), ("zb-h1", 3)])
def test_gradients_of_parameters(schedule, first):
    names = [name for name, _ in tiny_vit().named_parameters()][first::7]
    cases = [(name, *CASES[place % len(CASES)]) for place, name in enumerate(names)]

    def spoiler(name, microbatch, value):
        def put(model):
            parameter = dict(model.named_parameters()).get(name)
            return None if parameter is None else parameter.register_hook(At(microbatch, value))

        return put

    found = reports([spoiler(*case) for case in cases], schedule=schedule)
    for (name, microbatch, value), (text, rank) in zip(cases, found, strict=True):
        what = f"the gradient of parameter '{name}' holds {named(value)}"
        assert text == f"{what} (stage {rank}, micro-batch {microbatch}) on rank {rank}"


def test_parameters_and_inputs():
    class Unset:
        def __init__(self, tensor):
            self.tensor, self.before = tensor, tensor.detach().clone()

        def remove(self):
            with torch.no_grad():
                self.tensor.copy_(self.before)

    def put(model):
        if not owned_by(model, "vit.layers.3"):
            return None
        weight = model.vit.layers[3].mlp.fc1.weight
        unset = Unset(weight)
        with torch.no_grad():
            weight[0, 0] = math.nan
        return unset

    ((text, rank),) = reports([put])
    assert text == "parameter 'vit.layers.3.mlp.fc1.weight' holds NaN (stage 1, micro-batch 0) on rank 1"
    assert rank == 1


def test_what_cannot_be_repeated_is_said_to_be_so():
    def put(model):
        times = []

        def once(gradient):
            times.append(1)
            return gradient * (math.inf if len(times) == 1 else 1.0)

        return model.classifier.bias.register_hook(once) if owned_by(model, "classifier") else None

    ((text, _),) = reports([put])
    assert text == "none in a second run of the step, so it depends on something that is not reproducible"


@pytest.mark.parametrize("precision", ["fp16", "bf16", "fp32"])
def test_looking_changes_nothing(precision):
    """Gradients, running statistics and random numbers are as they were."""

    def run():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 1))
        booster, model, optimizer = boosted(model, sgd, (torch.ones(4, 4),), precision=precision, num_microbatches=2)
        engine, examined = booster.plugin._engine(model), []
        close = engine.epilogue.close

        def step_reduce(end, program, task, failure):
            engine.buckets.finish_grad_sync()
            before = (
                dict(optimizer.gradients()),
                {n: t.clone() for n, t in model.state_dict().items()},
                torch.get_rng_state(),
            )
            examined.append(engine.diagnosis.diagnose(program, task))
            assert_same(dict(optimizer.gradients()), before[0])
            assert_same(model.state_dict(), before[1])
            assert torch.equal(torch.get_rng_state(), before[2])
            return close(end, program, task, failure)

        engine.epilogue.close = step_reduce
        for _ in range(2):
            batch = (torch.randn(4, 4),)
            booster.execute_pipeline(iter([batch]), model, lambda out, _: out.square().mean(), optimizer)
        assert examined == ["none in a second run of the step, so it depends on something that is not reproducible"] * 2

    Loopback(1).run(run)
