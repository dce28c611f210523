"""Models that users write, cut every way: losses and gradients of one process."""

import functools
import re

import pytest
import torch
from partition import (
    container_models,
    flow_models,
    introspecting_models,
    tracer_edge_models,
    user_models,
    wrapper_models,
)
from partition.tracing import compare_traces
from support import assert_near, assert_same, boosted, sgd, train
from torch.utils import _pytree as pytree

from hybridpp.cluster import Loopback
from hybridpp.errors import PartitionError

MODULES = (user_models, flow_models, container_models, tracer_edge_models, introspecting_models, wrapper_models)
LAYOUTS = ({"pp_size": 2}, {"pp_size": 4}, {"pp_size": 2, "schedule": "gpipe", "num_model_chunks": 2})


def numbers(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


ROWS, IMAGES = [numbers(6, 4)], [numbers(6, 3, 8, 8)]
# The third is longer than the second, the last one known.
LENGTHS = [numbers(6, length, 4) for length in (4, 3, 5, 4)]
IDS = [torch.arange(12).view(6, 2) % 7]
FLOW = [
    {"x": numbers(6, 6), "mask": torch.ones(6, 1)},
    {"x": numbers(6, 4)},
    {"x": numbers(6, 5), "double": True},
]
BATCHES = {
    "UNet": IMAGES,
    "Pyramid": IMAGES,
    "TiedHead": IDS,
    "FrozenEmbedding": IDS,
    "OwnParameters": LENGTHS[:2],
    "CachedTable": LENGTHS,
    "Masking": LENGTHS,
    "Skipping": LENGTHS[:2],
    "Keywords": [{"x": numbers(6, 4)}, {"x": numbers(6, 4), "mask": numbers(6, 1)}],
    "Flow": FLOW,
    "MasksBetween": [{"x": numbers(6, 4), "mask": mask} for mask in (torch.ones(6, 1), torch.arange(6.0)[:, None])],
    "Order": [{"x": numbers(6, 4), "order": torch.tensor([1, 0, 2, 3]).expand(6, 4)}],
    "TwoTowers": [{"left": numbers(6, 4), "right": numbers(6, 3)}],
    "Recurrent": [numbers(6, 3, 4)],
}
# Blocks whose model is the plain row of them.
IN_A_ROW = [functools.partial(user_models.Base, block) for block in (flow_models.Masking, user_models.Adapter)]


def of(module):
    return [
        cls
        for cls in vars(module).values()
        if isinstance(cls, type)
        and cls.__module__ == module.__name__
        and issubclass(cls, torch.nn.Module)
        and not cls.__name__.startswith("_")
        and not issubclass(cls, torch.nn.Linear | user_models.Conv | user_models.Adapter)
    ]


def squares(outputs, inputs):
    leaves = [outputs.hidden, *outputs.extra] if isinstance(outputs, container_models.State) else [outputs]
    return sum(leaf.square().mean() for leaf in leaves)


squares.reduction = "mean"  # of what micro-batches give: some models return sums over samples, or compare samples


def run(make_model, batches, **settings):
    # Copies: some models write to their inputs.
    batches = [pytree.tree_map_only(torch.Tensor, torch.clone, batch) for batch in batches]
    return train(make_model, batches, criterion=squares, num_microbatches=2, **settings)


# torch's fake tensors ask a buffer that a fake was written to for its gradient, and hide the warning in vain.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
@pytest.mark.covering
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize(
    "make_model",
    [*(cls for module in MODULES for cls in of(module)), *IN_A_ROW],
    ids=lambda value: (value.args[0] if isinstance(value, functools.partial) else value).__name__,
)
def test_a_model_gives_losses_and_gradients_of_one_process(make_model, layout, monkeypatch):
    """On two stages, and on four, on as many ranks and on two. Each rank traces."""
    named = make_model.args[0] if isinstance(make_model, functools.partial) else make_model
    batches = BATCHES.get(named.__name__, ROWS)
    expected = run(make_model, batches)
    to_rounding = any(named in module.TO_ROUNDING for module in MODULES)
    compare_traces(monkeypatch)
    actual = run(make_model, batches, **layout)
    for losses in actual["losses"]:
        assert losses == pytest.approx(expected["losses"][0], rel=1e-6 if to_rounding else 0)
    (assert_near if to_rounding else assert_same)(actual["gradients"], expected["gradients"])


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_running_statistics_are_those_of_one_process(layout):
    def statistics(**layout):
        def step():
            booster, model, optimizer = boosted(user_models.Normed(), sgd, ROWS[0], num_microbatches=2, **layout)
            for _ in range(2):
                booster.execute_pipeline(iter(ROWS), model, squares, optimizer)
                optimizer.step()
            return dict(model.named_buffers())

        ranks = Loopback(layout.get("pp_size", 1)).run(step)
        assert all(ranks)
        return {name: buffer for rank in ranks for name, buffer in rank.items()}

    expected = statistics()
    assert expected["body.3.1.num_batches_tracked"] == 4
    assert_same(statistics(**layout), expected)


class Yielding(torch.nn.Linear):
    """Returns a generator."""

    def forward(self, x):
        yield super().forward(x)


class Holding(torch.nn.Linear):
    """Returns an object that torch knows nothing about."""

    def forward(self, x):
        return container_models.Holder(x=super().forward(x))


class Unpacking(user_models.Base):
    """Looks into what a block returned."""

    def forward(self, x):
        for block in self.blocks:
            found = block(x)
            x = found.x if hasattr(found, "x") else next(found)
        return self.head(x)


@pytest.mark.parametrize(("block", "kind"), [(Yielding, "generator"), (Holding, "Holder")])
def test_what_cannot_travel_is_refused_where_it_is_used(block, kind):
    text = (
        f"unit 'blocks.0' returned a {kind}, which cannot be sent to another stage, but is used there. "
        "Return tensors in tuples, lists, dicts or dataclasses, or use pp_size=1."
    )
    make_model = functools.partial(Unpacking, block)
    run(make_model, ROWS)
    with pytest.raises(PartitionError, match=f"^{re.escape(text)}"):
        run(make_model, ROWS, pp_size=2)


@pytest.mark.parametrize("make_model", wrapper_models.MODELS)
def test_what_a_wrapper_holds_is_shared_out_evenly(make_model):
    trained = run(make_model, ROWS, pp_size=2)
    sizes = {name: weight.numel() for name, weight in trained["weights"].items()}
    shares = [sum(sizes[name] for name in names) / sum(sizes.values()) for names in trained["names"]]
    assert max(shares) < 0.75
