"""The declared order of layers is right: where two that meet on a module do not commute, the other order fails."""

import functools
from itertools import combinations

import pytest
import torch
from hybridpp_plugins import apply_tp
from module_adapter.layer_models import LENGTH, WIDTH, Mixed, bloom, mlp, olmo2
from support import assert_near, assert_same, image_batch, model_loss, on_ranks, tiny_vit, train
from torch import nn

from hybridpp.errors import HybridppError
from hybridpp.module_adapter import ORDER, ModuleAdapter, order
from hybridpp.module_adapter import AdapterLayer as Layer
from hybridpp.pipeline import WeightGradients
from hybridpp.precision import wrap_dtype_boundaries
from hybridpp.sharding_plan import DimShard, ShardingSpec
from hybridpp.tensor_parallel import shard

BATCH = [image_batch(4)]
IDS = torch.arange(16).reshape(2, 8) % 7
TEXT = {"input_ids": IDS, "labels": IDS}
ROWS = (torch.randn(4, LENGTH, WIDTH, generator=torch.Generator().manual_seed(1)),)
PLAN = {"*.[qkv]_proj": "column", "*.o_proj": "row", "*.fc1": "column", "*.fc2": "row"}
RECOMPUTES = {"gradient_checkpoint_config": {"gradient_checkpointing_ratio": 1.0}}
CHUNKS = {"num_microbatches": 2, "pp_size": 2}
SEQUENCES = {"tp_size": 2, "enable_sequence_parallelism": True}


def with_outside(inner, outer):
    """The declared order but for one layer, which is put just outside of another one."""
    others = [layer for layer in ORDER if layer is not inner]
    others.insert(others.index(outer) + 1, inner)
    return tuple(others)


def with_inside(inner, outer):
    """The declared order but for one layer, which is put just inside of another one."""
    others = [layer for layer in ORDER if layer is not outer]
    others.insert(others.index(inner), outer)
    return tuple(others)


@pytest.fixture(scope="module", autouse=True)
def plans_are_searched_once():
    """For each class of models: the order of layers is no part of a plan."""
    found = {}

    def once(name, find):
        def finds(model, *args):
            if (name, type(model)) not in found:
                found[name, type(model)] = find(model, *args)
            return found[name, type(model)]

        return finds

    with pytest.MonkeyPatch.context() as patch:
        for name in ("find_tp_plan", "sequence_plan"):
            patch.setattr(apply_tp, name, once(name, getattr(apply_tp, name)))
        yield


def cosines(outputs, inputs):
    return outputs.cos().mean()


# Models in whose modules layers meet: what makes them, a batch, the criterion, and settings.
STUDIES = {
    "units": (Mixed, ROWS, cosines, SEQUENCES | {"precision": "bf16", "fp32_modules": ["*.parts.*"]}),
    "cuts in blocks": (
        Mixed,
        ROWS,
        cosines,
        SEQUENCES | {"pp_size": 2, "split_points": {"blocks.0.parts.3.1": "after"}},
    ),
    "recomputed parts": (
        Mixed,
        ROWS,
        cosines,
        RECOMPUTES | {"tp_size": 2, "pp_size": 2, "split_points": {"blocks.0.parts.1": "after"}},
    ),
    "recomputed norms": (
        Mixed,
        ROWS,
        cosines,
        RECOMPUTES | {"tp_size": 2, "pp_size": 2, "split_points": {"blocks.0.parts.3.2": "after"}},
    ),
    "biases of heads": (bloom, TEXT, model_loss, SEQUENCES | {"precision": "bf16", "fp32_modules": ["*.h.0"]}),
    "recomputed biases": (bloom, TEXT, model_loss, RECOMPUTES | {"tp_size": 2}),
    "layers as blocks": (
        mlp,
        ROWS,
        cosines,
        RECOMPUTES
        | {
            "tp_size": 2,
            "tensor_parallel_plan": {"0": "column", "2": "row"},
            "precision": "bf16",
            "fp32_modules": ["0"],
        },
    ),
    "gathered norms": (olmo2, TEXT, model_loss, SEQUENCES | RECOMPUTES | {"precision": "bf16"}),
    "deferred": (lambda: tiny_vit(0.5, num_layers=2), BATCH[0], model_loss, CHUNKS | {"schedule": "zb-h1"}),
    "half precision": (
        lambda: tiny_vit(0.5, num_layers=2),
        BATCH[0],
        model_loss,
        CHUNKS | RECOMPUTES | {"precision": "bf16", "fp32_modules": ["*.layers.0", "classifier"], "schedule": "zb-h1"},
    ),
    "functions": (
        lambda: Encoder(),
        (torch.randn(4, 3, 8, generator=torch.Generator().manual_seed(0)), torch.tensor([0, 1, 2, 0])),
        lambda outputs, inputs: outputs,
        {"precision": "bf16", "fp32_modules": ["blocks.0", "*.linear1"]},
    ),
}


def study(name):
    make, batch, criterion, settings = STUDIES[name]
    settings = {"num_microbatches": 1} | settings
    return train(make, [batch], criterion=criterion, **settings)["gradients"]


@pytest.fixture(scope="module")
def expected():
    """The gradients of studies in the declared order; and the sets of layers that modules carry there."""
    gradients, meetings, put = {}, {}, ModuleAdapter.wrap

    def noting(self, module, *args):
        put(self, module, *args)
        meetings.setdefault(name, set()).add(frozenset(self.layers_of(module)))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ModuleAdapter, "wrap", noting)
        for name in STUDIES:
            gradients[name] = study(name)
    return gradients, meetings


def vit(dropout=0.0):
    return lambda: tiny_vit(dropout, num_layers=2)


def trained(make, **settings):
    return train(make, BATCH, **CHUNKS, **settings)["gradients"]


def check_split_shards():
    """Weight gradients of sharded layers that are deferred are those of unsharded ones."""
    sharded = trained(vit(), schedule="zb-h1", tp_size=2, tensor_parallel_plan=PLAN)
    assert_near(sharded, trained(vit()))


def check_dropout_of_schedules():
    """What dropout draws does not depend on the schedule."""
    assert_same(trained(vit(0.5), schedule="zb-h1"), trained(vit(0.5)))


def check_deferred_in_fp32():
    """Weight gradients of layers in fp32 are deferred in a half-precision model too."""
    deferred, try_defer = [], WeightGradients.try_defer

    def spy(self, task, *args):
        if taken := try_defer(self, task, *args):
            deferred.extend(task.binding.names)
        return taken

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(WeightGradients, "try_defer", spy)
        trained(vit(), schedule="zb-h1", precision="bf16", fp32_modules=["*.fc1"])
    assert any(name.endswith("fc1.weight") for name in deferred)


class Encoder(nn.Module):
    """torch's own blocks, whose kernels refuse inputs of another dtype, and a loss inside."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True) for _ in range(2))
        self.head = nn.Linear(8, 3)

    def forward(self, x, labels):
        for block in self.blocks:
            x = block(x)
        return nn.functional.cross_entropy(self.head(x).mean(1), labels)


def graph_breaking(inner, x):
    torch._dynamo.graph_break()
    return inner(x)


def compiled(cache, inner, x):
    cache.append(cache.pop() if cache else torch.compile(inner, backend="eager", fullgraph=True))
    return cache[0](x)


def check_compiled_alone():
    """What is compiled is the user's forward, without collectives."""
    torch._dynamo.reset()
    module = nn.Linear(2, 2)
    adapter = ModuleAdapter(module)
    adapter.wrap(module, Layer.COMPILE, compiled, [])
    adapter.wrap(module, Layer.SHARD, graph_breaking)
    module(torch.ones(2))


@functools.cache
def mixed_in_one_process():
    """Without any of the layers whose order the check is about."""
    return train(Mixed, [ROWS], criterion=cosines, num_microbatches=2)["gradients"]


def check_mixed():
    """Attention that reads the width of its heads and experts, with sequences gathered around them."""
    run = train(Mixed, [ROWS], criterion=cosines, num_microbatches=2, **SEQUENCES)
    assert_near(run["gradients"], mixed_in_one_process())


def check_mixed_in_half():
    study("units")


def check_recomputed_sequences():
    """A recomputed block gathers its sequences again."""
    study("gathered norms")


def sums_in_fp32(make, spec, narrow):
    """The result and the input's gradient of a module in fp32 are rounded once, after sums over the ranks."""

    def run(group=None):
        torch.manual_seed(0)
        model = nn.Sequential(make())
        x = torch.randn(64, 64).bfloat16()
        adapter = ModuleAdapter(model)
        if group is not None:
            shard(adapter, spec, group)
            x = narrow(x, group.rank)
        wrap_dtype_boundaries(adapter, {model[0]: torch.float32}, torch.bfloat16)
        x = x.detach().requires_grad_()
        y = model(x)
        y.float().cos().sum().backward()
        return y.detach(), x.grad

    return run(), on_ranks(2, run)


def differing(found, expected):
    """The share of numbers that were rounded otherwise; of sums that are rounded twice it is a third."""
    return (found != expected).float().mean()


def check_row_sums_in_fp32():
    spec = ShardingSpec(params={"0.weight": DimShard(1, (64,))}, reduce_outputs=frozenset({"0"}))
    (result, _), ranks = sums_in_fp32(lambda: nn.Linear(64, 64, bias=False), spec, lambda x, rank: x.chunk(2, -1)[rank])
    assert differing(ranks[0][0], result) < 0.01


def check_gathered_sums_in_fp32():
    spec = ShardingSpec(gather_inputs={"0": DimShard(-1, (64,))})
    (_, gradient), ranks = sums_in_fp32(lambda: nn.RMSNorm(64), spec, lambda x, rank: x.chunk(2, -1)[rank])
    assert differing(torch.cat([own for _, own in ranks], -1), gradient) < 0.01


# Pairs, the inner layer first, with what fails in the other order.
MATTERS = {
    (Layer.COMPILE, Layer.SHARD): check_compiled_alone,
    (Layer.SHARD, Layer.SEQUENCE_REPLICATED): check_mixed,
    (Layer.SHARD, Layer.WEIGHT_GRADIENTS): check_split_shards,
    (Layer.SHARD, Layer.DTYPE): check_row_sums_in_fp32,
    (Layer.GATHERED_INPUTS, Layer.DTYPE): check_gathered_sums_in_fp32,
    (Layer.LOCAL_WIDTH, Layer.SEQUENCE_GATHER): check_mixed,
    (Layer.LOCAL_WIDTH, Layer.SEQUENCE_REPLICATED): check_mixed,
    (Layer.LOCAL_WIDTH, Layer.DTYPE): check_mixed_in_half,
    (Layer.SEQUENCE_SHARD, Layer.RECOMPUTE): check_recomputed_sequences,
    (Layer.WEIGHT_GRADIENTS, Layer.DTYPE): check_deferred_in_fp32,
    (Layer.WEIGHT_GRADIENTS, Layer.LAYER_RNG): check_dropout_of_schedules,
}
# Pairs with a study in which they meet and have the same gradients in both orders.
COMMUTE = {
    # What shards a layer draws no random numbers, and runs wherever the layer does.
    (Layer.SHARD, Layer.FUNCTION_DTYPES): "units",
    (Layer.SHARD, Layer.LAYER_RNG): "units",
    (Layer.SHARD, Layer.UNIT_RNG): "units",
    (Layer.SHARD, Layer.RECOMPUTE): "layers as blocks",
    (Layer.SHARD, Layer.STAGE): "layers as blocks",
    # Hidden states are no sharded argument: one changes those, the other the rest.
    (Layer.SHARDED_ARGUMENTS, Layer.SEQUENCE_SHARD): "biases of heads",
    (Layer.SHARDED_ARGUMENTS, Layer.DTYPE): "biases of heads",
    (Layer.SHARDED_ARGUMENTS, Layer.FUNCTION_DTYPES): "biases of heads",
    (Layer.SHARDED_ARGUMENTS, Layer.UNIT_RNG): "biases of heads",
    (Layer.SHARDED_ARGUMENTS, Layer.RECOMPUTE): "recomputed biases",
    (Layer.SHARDED_ARGUMENTS, Layer.STAGE): "biases of heads",
    (Layer.GATHERED_INPUTS, Layer.FUNCTION_DTYPES): "units",
    (Layer.GATHERED_INPUTS, Layer.UNIT_RNG): "units",
    (Layer.GATHERED_INPUTS, Layer.RECOMPUTE): "recomputed norms",
    (Layer.GATHERED_INPUTS, Layer.STAGE): "cuts in blocks",
    (Layer.LOCAL_WIDTH, Layer.FUNCTION_DTYPES): "units",
    (Layer.LOCAL_WIDTH, Layer.UNIT_RNG): "units",
    (Layer.LOCAL_WIDTH, Layer.RECOMPUTE): "recomputed parts",
    (Layer.LOCAL_WIDTH, Layer.STAGE): "cuts in blocks",
    # A gather copies, whatever the dtype.
    (Layer.SEQUENCE_GATHER, Layer.DTYPE): "units",
    (Layer.SEQUENCE_GATHER, Layer.FUNCTION_DTYPES): "units",
    (Layer.SEQUENCE_GATHER, Layer.UNIT_RNG): "units",
    (Layer.SEQUENCE_GATHER, Layer.STAGE): "cuts in blocks",
    (Layer.SEQUENCE_REPLICATED, Layer.DTYPE): "units",
    (Layer.SEQUENCE_REPLICATED, Layer.FUNCTION_DTYPES): "units",
    (Layer.SEQUENCE_REPLICATED, Layer.LAYER_RNG): "units",
    (Layer.SEQUENCE_REPLICATED, Layer.UNIT_RNG): "units",
    (Layer.SEQUENCE_REPLICATED, Layer.STAGE): "cuts in blocks",
    (Layer.SEQUENCE_SHARD, Layer.DTYPE): "biases of heads",
    (Layer.SEQUENCE_SHARD, Layer.FUNCTION_DTYPES): "biases of heads",
    (Layer.SEQUENCE_SHARD, Layer.UNIT_RNG): "biases of heads",
    (Layer.SEQUENCE_SHARD, Layer.STAGE): "biases of heads",
    (Layer.WEIGHT_GRADIENTS, Layer.FUNCTION_DTYPES): "half precision",
    (Layer.WEIGHT_GRADIENTS, Layer.UNIT_RNG): "deferred",
    (Layer.WEIGHT_GRADIENTS, Layer.RECOMPUTE): "layers as blocks",
    (Layer.WEIGHT_GRADIENTS, Layer.STAGE): "deferred",
    (Layer.DTYPE, Layer.FUNCTION_DTYPES): "functions",
    (Layer.DTYPE, Layer.LAYER_RNG): "functions",
    (Layer.DTYPE, Layer.UNIT_RNG): "half precision",
    (Layer.DTYPE, Layer.RECOMPUTE): "half precision",
    (Layer.DTYPE, Layer.STAGE): "half precision",
    (Layer.FUNCTION_DTYPES, Layer.UNIT_RNG): "functions",
    (Layer.FUNCTION_DTYPES, Layer.RECOMPUTE): "half precision",
    (Layer.FUNCTION_DTYPES, Layer.STAGE): "half precision",
    (Layer.FUNCTION_DTYPES, Layer.MODEL): "functions",
    # Where a forward is called by name; else stages and RNG streams are around the hooks, and recomputation inside.
    (Layer.UNIT_RNG, Layer.RECOMPUTE): "half precision",
    (Layer.UNIT_RNG, Layer.STAGE): "half precision",
    (Layer.RECOMPUTE, Layer.STAGE): "half precision",
}
# What each layer can be on, by the code that puts it there. Layers that have nothing in common never meet.
PUT_ON = {
    # shard.py: linear layers, embeddings, and modules that hold stacked weights themselves.
    Layer.SHARD: {"layer", "stacked weights"},
    # plan_search/: only arguments and results of the block that is searched, which has linear layers inside.
    Layer.SHARDED_ARGUMENTS: {"searched block"},
    # auxiliary_params.py, gathered_norms: a module in the block with none inside, whose weights are vectors.
    Layer.GATHERED_INPUTS: {"norm"},
    # candidates.py: the smallest module around the column layers of a group, if that is not the block.
    Layer.LOCAL_WIDTH: {"around layers"},
    # sequence_block.py: a module of the block around column layers; layers themselves gather without it.
    Layer.SEQUENCE_GATHER: {"around layers"},
    # sequence_block_search.py: modules around row layers; those with a matrix that are no linear layers, or
    # modules around them. A norm with running statistics is among those, but the input of none of them is gathered:
    # the gather joins the last dimension, and of an input [B, S, H] running statistics are over S.
    Layer.SEQUENCE_REPLICATED: {"around layers", "stacked weights", "matrix"},
    Layer.SEQUENCE_SHARD: {"searched block"},
    # split_backward_ops.py: linear layers, embeddings, convolutions of images. A convolution that gets [B, S, H] as an
    # image without a batch may have replicated sequences, too; its weight gradient is deferred only for [B, C, H, W].
    Layer.WEIGHT_GRADIENTS: {"layer"},
    # rng.py, inner_linear_layers: linear layers, and modules of other classes with a matrix as their weight (routers).
    Layer.LAYER_RNG: {"layer", "matrix"},
}
NEVER_MEET = {
    (Layer.SEQUENCE_GATHER, Layer.SEQUENCE_REPLICATED): "the search gathers for layers outside of replicated modules",
    # tp_context.py, _known_sequence_shape: where only a part of the block is recomputed.
    (Layer.SEQUENCE_GATHER, Layer.RECOMPUTE): "a block with sharded sequences is recomputed as a whole, or refused",
    (Layer.SEQUENCE_REPLICATED, Layer.RECOMPUTE): "a block with sharded sequences is recomputed as a whole, or refused",
    (Layer.FUNCTION_DTYPES, Layer.LAYER_RNG): "inner_linear_layers are inside of the finest units, which those are on",
    (Layer.LAYER_RNG, Layer.UNIT_RNG): "inner_linear_layers are inside of the finest units",
    (Layer.LAYER_RNG, Layer.RECOMPUTE): "blocks consist of finest units",
    (Layer.LAYER_RNG, Layer.STAGE): "units consist of finest units",
    **{
        (layer, Layer.MODEL): "the model is no unit, block or layer of itself"
        for layer in ORDER
        if layer is not Layer.FUNCTION_DTYPES
    },
}
# Seams that no package uses yet: tests/module_adapter/test_seams.py shows what they need.
SEAMS = {Layer.COMPILE, Layer.GATHER_PARAMETERS}


def can_meet(inner, outer):
    kinds = PUT_ON.get(inner), PUT_ON.get(outer)
    return (None in kinds or not kinds[0].isdisjoint(kinds[1])) and (inner, outer) not in NEVER_MEET


def test_every_pair_that_can_meet_is_looked_at():
    pairs = {pair for pair in combinations(ORDER, 2) if SEAMS.isdisjoint(pair) and can_meet(*pair)}
    assert pairs == {pair for pair in {**MATTERS, **COMMUTE} if SEAMS.isdisjoint(pair)}


def names(pair):
    return " ".join(layer.name for layer in pair)


@functools.cache
def holds_in_the_declared_order(check):
    """Once for each check, which also finds its plan: a search under another order would avoid what fails in it."""
    check()


@pytest.mark.parametrize("pair", MATTERS, ids=names)
def test_a_pair_in_the_declared_order_is_right(pair):
    holds_in_the_declared_order(MATTERS[pair])


@pytest.mark.covering
@pytest.mark.parametrize("move", [with_outside, with_inside], ids=["outside", "inside"])
@pytest.mark.parametrize("pair", MATTERS, ids=names)
def test_a_pair_in_the_other_order_fails(pair, move, monkeypatch):
    holds_in_the_declared_order(MATTERS[pair])
    monkeypatch.setattr(order, "ORDER", move(*pair))
    with pytest.raises((AssertionError, RuntimeError, HybridppError, torch._dynamo.exc.Unsupported)):
        MATTERS[pair]()


@pytest.fixture(scope="module")
def moved_inside():
    """The gradients of a study with a layer inside of all those that it commutes with there, in one study."""
    found = {}

    def gradients(name, outer):
        if (name, outer) not in found:
            innermost = min((pair[0] for pair in COMMUTE if (COMMUTE[pair], pair[1]) == (name, outer)), key=ORDER.index)
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(order, "ORDER", with_inside(innermost, outer))
                found[name, outer] = study(name)
        return found[name, outer]

    return gradients


@pytest.mark.parametrize("pair", COMMUTE, ids=names)
def test_a_pair_commutes_where_it_meets(pair, expected, moved_inside):
    gradients, meetings = expected
    name = COMMUTE[pair]
    assert any(layers.issuperset(pair) for layers in meetings[name])
    assert_same(moved_inside(name, pair[1]), gradients[name])


def test_no_other_pair_meets_in_a_study(expected):
    met = {
        pair
        for every in expected[1].values()
        for layers in every
        for pair in combinations(ORDER, 2)
        if layers >= {*pair}
    }
    assert met <= {*MATTERS, *COMMUTE}
