"""Plans for blocks that nobody has described: their layers, by heads and by width."""

import copy
from types import SimpleNamespace

import pytest
import torch
from attention_blocks import HEAD, HEADS, WIDTH, Attention, Block, Gated, infer
from torch import Tensor, nn
from torch.nn import functional

from hybridpp.plan_search import block_search
from hybridpp.plan_search.model_search import infer_plan
from hybridpp.sharding_plan.sharding_spec import DimShard


class Fused(nn.Module):
    """Queries, keys and values from one layer, in one of the orders."""

    def __init__(self, interleaved: bool):
        super().__init__()
        self.num_heads, self.split_size, self.interleaved = HEADS, WIDTH, interleaved
        self.qkv, self.o = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        mixed = self.qkv(x)
        if self.interleaved:
            q, k, v = mixed.view(*x.shape[:2], self.num_heads, 3, HEAD).unbind(3)
        else:
            q, k, v = (part.view(*x.shape[:2], self.num_heads, HEAD) for part in mixed.split(self.split_size, -1))
        y = functional.scaled_dot_product_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2))
        return self.o(y.transpose(1, 2).flatten(2))


def test_attention_and_a_gated_layer_are_divided_by_heads_and_by_width():
    plan = infer(Block(attention=Attention(), mlp=Gated()))
    assert plan.styles == {
        "0.parts.attention.q": "column",
        "0.parts.attention.k": "column",
        "0.parts.attention.v": "column",
        "0.parts.attention.o": "row",
        "0.parts.mlp.gate": "column",
        "0.parts.mlp.up": "column",
        "0.parts.mlp.down": "row",
    }
    assert plan.spec.attributes == {("0.parts.attention", "num_heads"): 2, ("0.parts.attention", "kv_heads"): 2}
    assert not plan.reasons


@pytest.mark.parametrize(
    ("interleaved", "style"), [(False, "fused_column:concatenated:3"), (True, "column")], ids=["split", "by head"]
)
def test_the_layout_of_a_fused_layer_is_found(interleaved, style):
    plan = infer(Block(attention=Fused(interleaved)))
    assert plan.styles == {"0.parts.attention.qkv": style, "0.parts.attention.o": "row"}
    assert plan.spec.attributes["0.parts.attention", "num_heads"] == 2


def test_ranks_share_keys_and_values_where_those_have_fewer_heads():
    found = infer(Block(attention=Attention(kv_heads=2)), 4)
    assert found.styles["0.parts.attention.k"] == "column:2"
    assert found.spec.params["0.parts.attention.k.weight"] == DimShard(0, (8,), (2,))
    assert found.spec.attributes == {("0.parts.attention", "num_heads"): 1, ("0.parts.attention", "kv_heads"): 1}


def test_gradients_of_norms_per_head_are_summed():
    found = infer(Block(attention=Attention(norm=HEAD)))
    assert found.styles["0.parts.attention.norm"] == "partial_grad"
    assert found.spec.partial_grad == {"0.parts.attention.norm.weight", "0.parts.attention.norm.bias"}


class KeyNormed(Attention):
    """A norm of each head's keys; what it adds to them, a softmax does not see."""

    def __init__(self):
        super().__init__()
        self.key_norm = nn.LayerNorm(HEAD)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (self.heads(layer(x), self.num_heads) for layer in (self.q, self.k, self.v))
        y = functional.scaled_dot_product_attention(q, self.key_norm(k), v)
        return self.o(y.transpose(1, 2).reshape(*x.shape[:2], self.num_heads * self.head_dim))


def test_so_are_gradients_that_are_nothing_but_rounding():
    found = infer(Block(attention=KeyNormed()))
    assert found.spec.partial_grad == {"0.parts.attention.key_norm.weight", "0.parts.attention.key_norm.bias"}


def test_a_layer_that_feeds_the_result_stays_whole():
    found = infer(Block(one=nn.Linear(WIDTH, WIDTH)))
    assert not found.styles
    assert found.reasons == {"0.parts.one": "its output leaves the block"}


def test_heads_that_the_ranks_do_not_divide_are_named_with_sizes_that_work():
    found = infer(Block(attention=Attention(num_heads=6, kv_heads=6)), 4)
    assert not found.styles
    assert found.reasons["0.parts.attention.q"] == (
        "parts.attention.num_heads=6 is not divisible by tp_size=4 (sizes that work: 1, 2, 3 or 6)"
    )


def test_an_indivisible_width_is_named_instead_of_the_configured_heads():
    gated = Gated()
    gated.config = SimpleNamespace(num_attention_heads=6)
    assert infer(Block(gated=gated), 4).styles
    found = infer(Block(gated=gated), 5)
    assert set(found.reasons.values()) == {
        "its width=24 is not divisible by tp_size=5 (sizes that work: 1, 2, 3, 4, 6, 8, 12 or 24)"
    }


class Latent(nn.Module):
    """Keys and values from a narrow layer, part of which all heads read as it is."""

    def __init__(self) -> None:
        super().__init__()
        self.narrow, self.norm = nn.Linear(WIDTH, 8 + HEAD), nn.LayerNorm(8)
        self.q, self.v, self.o = nn.Linear(WIDTH, WIDTH), nn.Linear(8, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        latent, shared = self.narrow(x).split([8, HEAD], -1)
        q = self.q(x).unflatten(-1, (-1, HEAD)).transpose(1, 2)
        v = self.v(self.norm(latent)).unflatten(-1, (-1, HEAD)).transpose(1, 2)
        y = functional.scaled_dot_product_attention(q, shared[:, None].expand_as(v), v)
        return x + self.o(y.transpose(1, 2).flatten(2))


def test_gradients_of_a_replicated_layer_on_sharded_activations_are_summed():
    found = infer(Latent())
    assert found.styles == {"0.q": "column", "0.v": "column", "0.o": "row", "0.norm": "partial_grad"}
    assert found.spec.copy_outputs == {"0.narrow"}
    assert found.spec.copy_inputs == {"0.q"}
    assert found.spec.partial_grad == {"0.norm.weight", "0.norm.bias"}


def test_equal_blocks_are_tried_once_and_the_model_stays_as_it_was(monkeypatch):
    model = nn.Sequential(*(Block(attention=Attention(), mlp=Gated()) for _ in range(3)))
    before = copy.deepcopy(model.state_dict())
    runs = []
    forward = Gated.forward
    monkeypatch.setattr(Gated, "forward", lambda self, x: (runs.append(1), forward(self, x))[1])
    calls = {str(number): ((torch.randn(3, 5, WIDTH),), {}) for number in range(3)}
    infer_plan(model[:1], ["0"], calls, 2)
    for_one = len(runs)
    found = infer_plan(model, ["0", "1", "2"], calls, 2)
    assert len(runs) == 2 * for_one
    assert len(found.styles) == 3 * 7
    assert model[2].parts["attention"].num_heads == HEADS
    assert all(torch.equal(model.state_dict()[name], value) for name, value in before.items())
    assert all(not module._forward_hooks and not module._forward_pre_hooks for module in model.modules())


class Recurrent(Gated):
    """Leaves what it made on itself."""

    state: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        self.state = y if self.state is None else y + self.state
        return self.state


def test_a_block_that_keeps_a_state_begins_every_try_with_the_same():
    block = Block(mlp=Recurrent())
    assert len(infer(block).styles) == 3
    assert block.parts["mlp"].state is None


class Penalised(Gated):
    """Leaves a loss on itself, made of what each rank would have a part of."""

    def forward(self, x: Tensor) -> Tensor:
        inner = torch.relu(self.up(x))
        self.penalty = inner.square().mean()
        return self.down(torch.sigmoid(self.gate(x)) * inner)


def test_a_block_that_leaves_a_loss_of_divided_activations_stays_whole():
    found = infer(Block(mlp=Penalised()))
    assert not found.styles
    assert any("different results" in reason for reason in found.reasons.values())


def test_weights_need_no_memory():
    with torch.device("meta"):
        block = Block(attention=Attention(), mlp=Gated())
    assert len(infer(block).styles) == 7


def test_a_block_that_was_not_called_or_cannot_run_alone_is_named():
    model = nn.Sequential(Block(mlp=Gated()), Block(mlp=Gated()))
    found = infer_plan(model, ["0", "1"], {"1": ((torch.randn(3, 5, WIDTH + 1),), {})}, 2)
    assert found.reasons["0"] == "was not called"
    assert found.reasons["1"].startswith("cannot run alone (RuntimeError: ")


def test_differences_from_the_models_own_plan_are_told():
    model = nn.Sequential(Block(mlp=Gated(), one=nn.Linear(WIDTH, WIDTH)))
    model._tp_plan = {"*.parts.mlp.up": "colwise", "*.parts.mlp.down": "rowwise", "*.parts.one": "colwise"}
    found = infer_plan(model, ["0"], {"0": ((torch.randn(3, 5, WIDTH),), {})}, 2)
    assert found.differences == ("0.parts.one: colwise in the model's own plan, replicated here",)


class Sorted(nn.Module):
    """Sorts what its layers read: no rank can do that with a part of it."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x):
        return x + self.down(self.up(x.sort(-1).values).sort(-1).values)


def test_equal_layers_of_a_block_are_rejected_together(monkeypatch):
    calls = []
    verify = block_search.verify
    monkeypatch.setattr(block_search, "_MAX_CANDIDATES", 8)
    monkeypatch.setattr(block_search, "verify", lambda *args: calls.append(None) or verify(*args))
    tried = {}
    for number in (1, 3):
        block = nn.Sequential(*[Sorted() for _ in range(number)])
        plan = block_search.PlanSearch(block, [((torch.randn(2, 3, 8),), {})], 2).run()
        assert not plan.spec.params
        assert set(plan.reasons) == {f"{index}.{name}" for index in range(number) for name in ("up", "down")}
        assert len(set(plan.reasons.values())) == 2 * number
        tried[number] = len(calls)
        calls.clear()
    # The trial of all first candidates together is, of one group, the trial of its first.
    assert tried[1] == tried[3] - 1 > 0


class Ranked(Gated):
    """Sorts what it computes, so that no part of it can be computed alone."""

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x).sort(-1).values * self.gate(x).sort(-1).values)


def test_what_fewer_ranks_cannot_share_is_not_tried_for_more(monkeypatch):
    calls = []
    verify = block_search.verify
    monkeypatch.setattr(block_search, "_MAX_CANDIDATES", 8)
    monkeypatch.setattr(block_search, "verify", lambda *args: calls.append(None) or verify(*args))
    torch.manual_seed(0)
    model = nn.Sequential(Block(attention=Attention(), mlp=Gated(), ranked=Ranked()))
    samples = {"0": ((torch.randn(3, 5, WIDTH),), {})}
    fewer = infer_plan(model, ["0"], samples, 2)
    assert set(fewer.reasons) == {f"0.parts.ranked.{name}" for name in ("gate", "up", "down")}
    found = infer_plan(model, ["0"], samples, 4)
    calls.clear()
    assert infer_plan(model, ["0"], samples, 4, smaller=fewer) == found
    assert len(calls) == 1


def test_what_more_ranks_cannot_share_is_found_beside_a_plan_for_fewer():
    model = nn.Sequential(Block(attention=Attention(num_heads=6, kv_heads=6), mlp=Gated()))
    samples = {"0": ((torch.randn(3, 5, WIDTH),), {})}
    fewer = infer_plan(model, ["0"], samples, 2)
    assert len(fewer.styles) == 7
    assert infer_plan(model, ["0"], samples, 4, smaller=fewer) == infer_plan(model, ["0"], samples, 4)


def test_a_model_that_two_ranks_cannot_share_is_none_that_four_can():
    model = nn.Sequential(Block(ranked=Ranked()))
    samples = {"0": ((torch.randn(3, 5, WIDTH),), {})}
    fewer = infer_plan(model, ["0"], samples, 2)
    assert not fewer.styles
    assert infer_plan(model, ["0"], samples, 4, smaller=fewer) == fewer
