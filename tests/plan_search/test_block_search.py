"""How many trials a search needs: each runs the block on all ranks, so a large block must not need many."""

import pytest
from attention_blocks import HEAD, WIDTH, Attention, Block, Gated, infer
from torch import nn

from hybridpp.plan_search import block_search

GATED = {"gate": "column", "up": "column", "down": "row"}


@pytest.fixture
def trials(monkeypatch):
    """The specs that were tried, and what came of each."""
    seen = []
    verify = block_search.verify

    def noting(reference, spec, tp_size):
        found = verify(reference, spec, tp_size)
        seen.append((spec, not isinstance(found, block_search.Rejected)))
        return found

    monkeypatch.setattr(block_search, "verify", noting)
    return seen


class Unsplittable(nn.Module):
    """A norm between two layers needs the full width, and no shard of it will do."""

    def __init__(self):
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(WIDTH, WIDTH), nn.GroupNorm(1, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return self.down(self.norm(self.up(x).transpose(1, 2)).transpose(1, 2))


class Stack(nn.Module):
    """Equal modules, one after the other."""

    def __init__(self, make, number):
        super().__init__()
        self.stack = nn.ModuleList(make() for _ in range(number))

    def forward(self, x):
        for module in self.stack:
            x = x + module(x)
        return x


def styles_of(plan, module):
    prefix = f"0.parts.{module}."
    return {name.removeprefix(prefix): style for name, style in plan.styles.items() if name.startswith(prefix)}


def test_a_block_of_attention_and_layers_needs_one_trial(trials):
    assert len(infer(Block(attention=Attention(), mlp=Gated())).styles) == 7
    assert [right for _, right in trials] == [True]


def test_the_first_candidate_of_a_single_group_is_tried_once(trials):
    plan = infer(Block(other=Unsplittable()))
    assert plan.reasons.keys() == {"0.parts.other.up", "0.parts.other.down"}
    first = trials[0][0]
    assert [spec for spec, _ in trials].count(first) == 1
    assert len(trials) > 1


def test_equal_layers_of_a_stack_are_tried_together(trials):
    plan = infer(Block(other=Unsplittable(), stack=Stack(Gated, 5)))
    assert all(styles_of(plan, f"stack.stack.{number}") == GATED for number in range(5))
    assert plan.reasons.keys() == {"0.parts.other.up", "0.parts.other.down"}
    # All at once, which the other layers spoil; the first of the stack; all of it.
    assert [len(spec.reduce_outputs) for spec, right in trials if right] == [1, 5]
    assert [len(spec.reduce_outputs) for spec, _ in trials].count(1) < 20


def test_an_equal_layer_that_computes_otherwise_stays_replicated():
    stack = Stack(Gated, 3)
    forward = Gated.forward

    class Reads(Gated):
        def forward(self, x):
            return forward(self, x) * self.gate(x).mean(-1, keepdim=True)

    stack.stack[1].__class__ = Reads
    plan = infer(Block(stack=stack))
    assert [styles_of(plan, f"stack.stack.{number}") for number in range(3)] == [GATED, {}, GATED]


def test_heads_that_are_not_divisible_end_the_search_soon(trials):
    plan = infer(Block(attention=Attention(num_heads=3, kv_heads=3), mlp=Gated()), 2)
    assert styles_of(plan, "mlp") == GATED
    assert plan.reasons["0.parts.attention.q"].startswith("parts.attention.num_heads=3 is not divisible by tp_size=2")
    kinds = 1 + 3 + 1  # all four layers, each without one of those that read the input, and all at once
    assert len(trials) <= block_search._MAX_INDIVISIBLE * (kinds + 1)
    assert HEAD * 3 % 2 == 0  # the widths alone would be divisible
