"""Compiled blocks run compiled where they are owned; what is compiled around blocks is refused."""

import re

import pytest
import torch
from support import assert_near, assert_same, boosted, image_batch, sgd, tiny_vit, train
from torch import nn
from torch._dynamo.utils import counters
from torch.nn import functional

from hybridpp.cluster import Loopback
from hybridpp.errors import PartitionError

# The compiler looks at it of every tensor.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
BATCH = [image_batch(4)]


def compiled_vit(dropout=0.0, whole=None):
    """Every block compiled in place, or one module and all in it."""
    model = tiny_vit(dropout)
    for module in [model.get_submodule(whole)] if whole is not None else model.vit.layers:
        module.compile(backend="eager", fullgraph=True)
    return model


@pytest.fixture(autouse=True)
def _fresh():
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


def test_compiled_blocks_give_what_they_give_uncompiled():
    expected = train(tiny_vit, BATCH, num_microbatches=2)
    actual = train(compiled_vit, BATCH, num_microbatches=2, pp_size=2)
    # One for all blocks: nothing of ours makes one block another kind than the next.
    assert counters["stats"]["unique_graphs"] == 1
    assert actual["losses"] == expected["losses"] * 2
    assert_same(actual["gradients"], expected["gradients"])


def test_compiled_blocks_draw_the_same_on_any_number_of_stages():
    expected = train(lambda: compiled_vit(0.5), BATCH, num_microbatches=2)
    actual = train(lambda: compiled_vit(0.5), BATCH, num_microbatches=2, pp_size=4)
    assert actual["losses"] == expected["losses"] * 4
    assert_same(actual["gradients"], expected["gradients"])


@pytest.mark.covering
@pytest.mark.parametrize(("whole", "named"), [("", "the model"), ("vit", "module 'vit'")])
@pytest.mark.parametrize("pp_size", [1, 2])
def test_what_is_compiled_around_blocks_is_refused(whole, named, pp_size):
    text = f"{named} is compiled as one unit, so it cannot be cut between its blocks. Compile the blocks before boost"
    with pytest.raises(PartitionError, match=f"^{re.escape(text)}"):
        train(lambda: compiled_vit(whole=whole), BATCH, num_microbatches=2, pp_size=pp_size)


def test_a_compiled_wrapper_around_the_model_is_refused():
    with pytest.raises(PartitionError, match=r"^the model is compiled as one unit"):
        train(lambda: torch.compile(tiny_vit(), backend="eager"), BATCH, num_microbatches=2, pp_size=2)


class Scaled(nn.Module):
    """The script compiles its forward."""

    def __init__(self):
        super().__init__()
        self.layer, self.scale = nn.Linear(8, 8), nn.Parameter(torch.ones(8, 8))
        self.forward = torch.compile(self.forward, backend="aot_eager")

    def forward(self, x):
        return x + functional.gelu(self.layer(x)) @ self.scale / 8


@pytest.mark.parametrize("config", [None, {}], ids=["kept", "recomputed"])
def test_forwards_that_a_script_compiled_run_on_weights_gathered_by_unit(config):
    batch = [torch.ones(4, 8), torch.full((4, 8), 0.5)]

    def make():
        torch.manual_seed(0)
        return nn.Sequential(*(Scaled() for _ in range(2)))

    options = {"criterion": lambda y, _: y.square().mean(), "dp_size": 2}
    expected = train(make, batch, **options)
    options["gradient_checkpoint_config"] = config
    actual = train(make, batch, zero_stage=3, after=unsharded, **options)
    assert actual["losses"] == [pytest.approx(losses) for losses in expected["losses"]]
    for weights in actual["after"]:
        assert_near(weights, expected["weights"])


class CallingBlock(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.up, self.down, self.function = nn.Linear(8, 16), nn.Linear(16, 8), function

    def forward(self, x):
        return x + self.down(self.function(self.up(x)))


class Calling(nn.Module):
    """Its blocks call a function that the script compiled; they are too small to be gathered one by one."""

    def __init__(self, function):
        super().__init__()
        torch.manual_seed(0)
        self.stem = nn.Linear(8, 8)
        self.blocks = nn.ModuleList(CallingBlock(function) for _ in range(2))

    def forward(self, x):
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return x


def squashed(x):
    # Compiled, it keeps other tensors for its backward pass, or in another order.
    return x.tanh() * 1.5 + x.sigmoid()


def test_what_calls_compiled_functions_is_recomputed_as_it_was_computed():
    batches = [torch.randn(8, 8, generator=torch.Generator().manual_seed(seed)) for seed in range(2)]
    options = {"criterion": lambda y, _: y.square().mean(), "num_microbatches": 2}
    expected = train(lambda: Calling(squashed), batches, **options)["weights"]
    compiled = torch.compile(squashed, backend="aot_eager")
    options |= {"gradient_checkpoint_config": {}, "dp_size": 2, "zero_stage": 3, "after": unsharded}
    for weights in train(lambda: Calling(compiled), batches, **options)["after"]:
        assert_near(weights, expected, 1e-6)


def test_the_trials_of_a_plan_compile_nothing():
    graphs = []

    def count(graph, _):
        graphs.append(graph)
        return graph.forward

    compiled = torch.compile(squashed, backend=count)
    Loopback(2).run(lambda: boosted(Calling(compiled), sgd, torch.ones(4, 8), tp_size=2))
    assert not graphs


def unsharded(booster, model, optimizer):
    with booster.unsharded(model):
        return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def test_compiled_blocks_are_recomputed():
    runs = []

    def counted():
        model = compiled_vit()
        for block in model.vit.layers:
            compiled = block._compiled_call_impl
            block._compiled_call_impl = lambda *args, compiled=compiled, **named: (
                runs.append(1) or compiled(*args, **named)
            )
        return model

    settings = {"num_microbatches": 2, "pp_size": 2}
    expected = train(compiled_vit, BATCH, **settings)
    config = {"gradient_checkpointing_ratio": 1.0}
    actual = train(counted, BATCH, gradient_checkpoint_config=config, **settings)
    # Twice per micro-batch and block, and one block in each rank's trace.
    assert len(runs) == 2 * 4 * 2 + 2
    assert_same(actual["gradients"], expected["gradients"])


def test_compiling_after_boost_is_refused():
    _, model, _ = boosted(tiny_vit(), sgd, BATCH[0])
    for module in (model, model.vit.layers[0]):
        with pytest.raises(PartitionError, match=r"^a model must be compiled before boost"):
            module.compile(backend="eager")
