"""A plan that is tried again, for a call of the run, on a block as it is by then."""

import pytest
import torch
from torch import nn

from hybridpp.module_adapter import ModuleAdapter
from hybridpp.plan_search import LaterCall, SizesOfShard, UnshardedBlock, Verdict, infer_plan, try_later_call
from hybridpp.tensor_parallel import shard


class Counting(nn.Module):
    """Normalises all features after some calls."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))
        self.options, self.width = {"is_on": False}, 16

    def forward(self, x, scale=None):
        self.calls += 1
        h = self.up(x).tanh()
        if self.calls > 5 or self.options["is_on"]:
            h = h / h.norm(dim=-1, keepdim=True)
        if scale is not None:
            h = h * scale
        if x.shape[-1] == 7:
            raise RuntimeError("no such width")
        return self.down(h)


def tried(change=lambda block: None, arguments=((), {}), x=None):
    """What a trial of a later call says of the plan that was found for the block at first."""
    model = nn.Sequential(Counting())
    x = torch.randn(4, 8) if x is None else x
    spec = infer_plan(model, ["0"], {"0": ((torch.randn(4, 8),), {})}, 2).spec.of_block("0")
    assert set(spec.params) == {"up.weight", "up.bias", "down.weight"}
    block = model[0]

    unsharded, sizes = UnshardedBlock(block), SizesOfShard(block)
    shard(ModuleAdapter(block), spec, FirstOfTwo())
    sizes.sharded()
    change(block)
    args, kwargs = arguments
    return try_later_call(unsharded.as_it_is(block, sizes), spec, LaterCall(((x, *args), kwargs), True, ()), 2)


class FirstOfTwo:
    """A group of which only the first rank is here."""

    rank, size, overlaps = 0, 2, False


def test_the_same_call_is_right():
    assert tried().verdict is Verdict.RIGHT


@pytest.mark.parametrize("change", [lambda one: one.calls.fill_(9), lambda one: one.options.update(is_on=True)])
def test_state_of_the_run_is_that_of_the_trial(change):
    found = tried(change)
    assert found.verdict is Verdict.WRONG
    assert found.why == "gives other results or gradients than whole layers"


def test_an_argument_of_all_features_is_unknown_where_shards_raise():
    found = tried(arguments=((torch.randn(16),), {}))
    assert found.verdict is Verdict.UNKNOWN
    assert found.why.startswith("with shards it raises RuntimeError: The size of tensor a (8) must match")


def test_a_call_that_raises_is_unknown():
    found = tried(x=torch.randn(4, 7))
    assert found.verdict is Verdict.UNKNOWN
    assert found.why.startswith("it cannot run alone (RuntimeError: ")


def test_results_that_are_not_finite_are_unknown():
    found = tried(x=torch.full((4, 8), float("nan")))
    assert found == (Verdict.UNKNOWN, "its results are not finite")


def test_a_block_of_which_a_module_was_replaced_is_refused():
    block = Counting()
    unsharded, sizes = UnshardedBlock(block), SizesOfShard(block)
    sizes.sharded()
    block.up = nn.Identity()
    with pytest.raises(ValueError, match="its modules have been replaced"):
        unsharded.as_it_is(block, sizes)


def test_sizes_of_the_shard_do_not_get_into_the_unsharded_block():
    block = Counting()
    unsharded, sizes = UnshardedBlock(block), SizesOfShard(block)
    block.width = 8
    sizes.sharded()
    assert unsharded.as_it_is(block, sizes).width == 16
    block.width = 4
    assert unsharded.as_it_is(block, sizes).width == 4
