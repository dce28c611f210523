"""Plans for blocks that nobody has described."""

import copy
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from hybridpp.tensor_parallel.division import Part
from hybridpp.tensor_parallel.inference.model import Inference, infer_plan

WIDTH, HEADS, HEAD = 16, 4, 4


class Attention(nn.Module):
    """Reshapes by the number of heads and the width, as most do."""

    def __init__(self, num_heads: int = HEADS, kv_heads: int = HEADS, norm: int | None = None):
        super().__init__()
        self.num_heads, self.kv_heads, self.head_dim = num_heads, kv_heads, HEAD
        self.q = nn.Linear(WIDTH, num_heads * HEAD)
        self.k = nn.Linear(WIDTH, kv_heads * HEAD)
        self.v = nn.Linear(WIDTH, kv_heads * HEAD)
        self.o = nn.Linear(num_heads * HEAD, WIDTH)
        self.norm_width, self.norm = norm, nn.LayerNorm(norm) if norm else None

    def heads(self, x: Tensor, number: int) -> Tensor:
        return x.view(*x.shape[:2], number, self.head_dim).transpose(1, 2)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.q(x), self.k(x), self.v(x)
        q = self.heads(self.norm(q) if self.norm_width == WIDTH else q, self.num_heads)
        q = self.norm(q) if self.norm_width == HEAD else q
        k, v = self.heads(k, self.kv_heads), self.heads(v, self.kv_heads)
        times = self.num_heads // self.kv_heads
        y = functional.scaled_dot_product_attention(q, k.repeat_interleave(times, 1), v.repeat_interleave(times, 1))
        return self.o(y.transpose(1, 2).reshape(*x.shape[:2], self.num_heads * self.head_dim))


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


class Gated(nn.Module):
    """A multi-layer perceptron with a gate."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(WIDTH, 24), nn.Linear(WIDTH, 24), nn.Linear(24, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(functional.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    """Normalises and adds, around whatever it is given."""

    def __init__(self, **parts: nn.Module):
        super().__init__()
        self.parts, self.norm = nn.ModuleDict(parts), nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        for part in self.parts.values():
            x = x + part(self.norm(x))
        return x


def infer(block: nn.Module, tp_size: int = 2, *args: Tensor, **kwargs: Tensor) -> Inference:
    torch.manual_seed(0)
    model = nn.Sequential(block)
    args = args or (torch.randn(3, 5, WIDTH),)
    return infer_plan(model, ["0"], {"0": (args, kwargs)}, tp_size)


def test_attention_and_a_gated_layer_are_divided_by_heads_and_by_width():
    plan = infer(Block(attention=Attention(), mlp=Gated())).plan
    assert plan.styles == {
        "0.parts.attention.q": "column",
        "0.parts.attention.k": "column",
        "0.parts.attention.v": "column",
        "0.parts.attention.o": "row",
        "0.parts.mlp.gate": "column",
        "0.parts.mlp.up": "column",
        "0.parts.mlp.down": "row",
    }
    assert plan.attributes == {"0.parts.attention": {"num_heads": 2, "kv_heads": 2}}
    assert not plan.reasons


@pytest.mark.parametrize(
    ("interleaved", "style"), [(False, "fused_column:concatenated:3"), (True, "column")], ids=["split", "by head"]
)
def test_the_layout_of_a_fused_layer_is_found(interleaved, style):
    plan = infer(Block(attention=Fused(interleaved))).plan
    assert plan.styles == {"0.parts.attention.qkv": style, "0.parts.attention.o": "row"}
    assert plan.attributes["0.parts.attention"]["num_heads"] == 2


def test_ranks_share_keys_and_values_where_those_have_fewer_heads():
    found = infer(Block(attention=Attention(kv_heads=2)), 4)
    assert found.plan.styles["0.parts.attention.k"] == "column:2"
    assert found.division.parts["0.parts.attention.k.weight"] == Part(0, (8,), (2,))
    assert found.plan.attributes == {"0.parts.attention": {"num_heads": 1, "kv_heads": 1}}


def test_gradients_of_norms_per_head_are_summed():
    found = infer(Block(attention=Attention(norm=HEAD)))
    assert found.plan.styles["0.parts.attention.norm"] == "summed"
    assert found.summed == {"0.parts.attention.norm.weight", "0.parts.attention.norm.bias"}


def test_a_norm_over_the_width_of_all_heads_is_given_all_of_it():
    found = infer(Block(attention=Attention(norm=WIDTH)))
    assert found.plan.styles["0.parts.attention.q"] == "column"
    assert found.plan.styles["0.parts.attention.norm"] == "summed"
    assert found.division.joins == {"0.parts.attention.norm": Part(-1, (WIDTH,))}
    assert not found.plan.reasons


class NormedKeys(Attention):
    """Of two heads of keys and values, those of keys are normalised together."""

    def __init__(self) -> None:
        super().__init__(kv_heads=2)
        self.k_norm = nn.LayerNorm(2 * HEAD)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.q(x), self.k_norm(self.k(x)), self.v(x)
        q, k, v = self.heads(q, self.num_heads), self.heads(k, self.kv_heads), self.heads(v, self.kv_heads)
        times = self.num_heads // self.kv_heads
        y = functional.scaled_dot_product_attention(q, k.repeat_interleave(times, 1), v.repeat_interleave(times, 1))
        return self.o(y.transpose(1, 2).reshape(*x.shape[:2], self.num_heads * self.head_dim))


def test_a_norm_over_heads_that_ranks_share_is_given_each_once():
    found = infer(Block(attention=NormedKeys()), 4)
    assert found.plan.styles["0.parts.attention.k"] == "column:2"
    assert found.division.joins == {"0.parts.attention.k_norm": Part(-1, (2 * HEAD,), (2,))}


class Scaled(Attention):
    """Beside shared heads of keys and values a scale and a gate per head of queries."""

    def __init__(self) -> None:
        super().__init__(kv_heads=2)
        self.scales = nn.Parameter(torch.randn(HEADS))
        self.gate = nn.Linear(WIDTH, HEADS)

    def forward(self, x: Tensor) -> Tensor:
        q = self.heads(self.q(x), self.num_heads) * self.scales[:, None, None]
        k, v = self.heads(self.k(x), self.kv_heads), self.heads(self.v(x), self.kv_heads)
        times = self.num_heads // self.kv_heads
        y = functional.scaled_dot_product_attention(q, k.repeat_interleave(times, 1), v.repeat_interleave(times, 1))
        y = y * self.gate(x).sigmoid().transpose(1, 2)[..., None]
        return self.o(y.transpose(1, 2).reshape(*x.shape[:2], self.num_heads * self.head_dim))


def test_shared_heads_are_copied_beside_what_there_is_for_every_head():
    found = infer(Block(attention=Scaled()), 4)
    styles = {"q": "column", "k": "column:2", "v": "column:2", "gate": "column", "o": "row"}
    assert found.plan.styles == {f"0.parts.attention.{name}": style for name, style in styles.items()}
    assert found.division.parts["0.parts.attention.scales"] == Part(0, (HEADS,))


def test_a_layer_that_feeds_the_result_stays_whole():
    found = infer(Block(one=nn.Linear(WIDTH, WIDTH)))
    assert not found.plan.styles
    assert found.plan.reasons == {"0.parts.one": "its output leaves the block"}


def test_heads_that_the_ranks_do_not_divide_are_named_with_sizes_that_work():
    found = infer(Block(attention=Attention(num_heads=6, kv_heads=6)), 4)
    assert not found.plan.styles
    assert found.plan.reasons["0.parts.attention.q"] == (
        "parts.attention.num_heads=6 is not divisible by tp_size=4 (sizes that work: 1, 2, 3 or 6)"
    )


def test_a_width_that_the_ranks_do_not_divide_is_named_and_not_the_heads_of_a_configuration():
    gated = Gated()
    gated.config = SimpleNamespace(num_attention_heads=6)
    assert infer(Block(gated=gated), 4).plan.styles
    found = infer(Block(gated=gated), 5)
    assert set(found.plan.reasons.values()) == {
        "its width=24 is not divisible by tp_size=5 (sizes that work: 1, 2, 3, 4, 6, 8, 12 or 24)"
    }


class Biased(nn.Module):
    """Attention with a bias per head from a table, one that comes as an argument, and one as that of all samples."""

    def __init__(self) -> None:
        super().__init__()
        self.n_heads = HEADS
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))
        self.table = nn.Embedding(8, HEADS)  # of as many rows as there might be heads, too

    def forward(self, x: Tensor, bias: Tensor | None = None, slopes: Tensor | None = None) -> Tensor:
        shape = (*x.shape[:2], self.n_heads, HEAD)
        q, k, v = (layer(x).view(shape).transpose(1, 2) for layer in (self.q, self.k, self.v))
        scores = q @ k.transpose(-1, -2) + self.table(torch.arange(5)).t()[None, :, None]
        scores = scores if bias is None else scores + bias
        scores = scores if slopes is None else scores + slopes.view(x.shape[0], self.n_heads, 1, 5)
        return x + self.o((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))


@pytest.mark.parametrize(
    ("given", "part"),
    [
        ({}, None),
        ({"bias": torch.randn(1, HEADS, 5, 5)}, Part(1, (HEADS,))),
        ({"slopes": torch.randn(3 * HEADS, 1, 5)}, Part(0, (HEADS,), repeated=True)),
    ],
    ids=["table", "argument", "argument of all samples"],
)
def test_tables_and_arguments_that_are_indexed_by_head_are_divided_too(given, part):
    found = infer(Biased(), 2, torch.randn(3, 5, WIDTH), **given)
    assert len(found.plan.styles) == 4
    assert found.division.parts["0.table.weight"] == Part(1, (HEADS,))
    assert found.division.arguments == ({} if part is None else {("0", 1): part})


class Experts(nn.Module):
    """Three experts in two tensors, and how much each counts."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, 3)
        self.inner = nn.ParameterDict()
        self.experts = Tensors()

    def forward(self, x: Tensor) -> Tensor:
        return x + self.experts(x, self.router(x).softmax(-1))


class Tensors(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(3, 16, WIDTH))
        self.down = nn.Parameter(torch.randn(3, WIDTH, 8))
        self.inner_width = 8

    def forward(self, x: Tensor, weights: Tensor) -> Tensor:
        gate, up = torch.einsum("bsh,eih->bsei", x, self.up).split(self.inner_width, -1)
        return torch.einsum("bsei,ehi,bse->bsh", gate.sigmoid() * up, self.down, weights)


def test_experts_are_divided_inside_each():
    found = infer(Experts())
    assert found.plan.styles == {"0.experts": "experts"}
    assert found.plan.attributes == {"0.experts": {"inner_width": 4}}
    assert found.division.parts == {"0.experts.up": Part(1, (8, 8)), "0.experts.down": Part(2, (8,))}
    assert found.plan.reasons == {"0.router": "its output leaves the block"}


class Chooser(nn.Linear):
    """A router that is a linear layer itself, and returns two tensors."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]  # as transformers has it
        scores = super().forward(x)
        return scores.softmax(-1), scores


class Routed(Experts):
    def __init__(self) -> None:
        super().__init__()
        self.router, self.shared = Chooser(WIDTH, 3), Gated()

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        weights, scores = self.router(x)
        return x + self.experts(x, weights) + self.shared(x), scores


def test_a_router_that_returns_two_tensors_stays_whole_beside_divided_experts():
    found = infer(Routed())
    shared = {"0.shared.gate": "column", "0.shared.up": "column", "0.shared.down": "row"}
    assert found.plan.styles == {"0.experts": "experts", **shared}
    assert found.plan.reasons == {"0.router": "returns something else than one tensor"}


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
    assert len(found.plan.styles) == 3 * 7
    assert model[2].parts["attention"].num_heads == HEADS
    assert all(torch.equal(model.state_dict()[name], value) for name, value in before.items())
    assert all(not module._forward_hooks and not module._forward_pre_hooks for module in model.modules())


def test_weights_need_no_memory():
    with torch.device("meta"):
        block = Block(attention=Attention(), mlp=Gated())
    assert len(infer(block).plan.styles) == 7


def test_a_block_that_was_not_called_or_cannot_run_alone_is_named():
    model = nn.Sequential(Block(mlp=Gated()), Block(mlp=Gated()))
    found = infer_plan(model, ["0", "1"], {"1": ((torch.randn(3, 5, WIDTH + 1),), {})}, 2)
    assert found.plan.reasons["0"] == "was not called"
    assert found.plan.reasons["1"].startswith("cannot be tried alone (RuntimeError: ")


def test_differences_from_the_models_own_plan_are_told():
    model = nn.Sequential(Block(mlp=Gated(), one=nn.Linear(WIDTH, WIDTH)))
    model._tp_plan = {"*.parts.mlp.up": "colwise", "*.parts.mlp.down": "rowwise", "*.parts.one": "colwise"}
    found = infer_plan(model, ["0"], {"0": ((torch.randn(3, 5, WIDTH),), {})}, 2)
    assert found.differences == ("0.parts.one: colwise in the model's own plan, whole here",)


class Watched(nn.Module):
    """Also returns what its heads look at; reads their number from a configuration."""

    def __init__(self, flat: bool) -> None:
        super().__init__()
        self.config, self.flat = SimpleNamespace(num_attention_heads=HEADS), flat
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        shape = (*x.shape[:2], self.config.num_attention_heads, HEAD)
        q, k, v = (layer(x).view(shape).transpose(1, 2) for layer in (self.q, self.k, self.v))
        seen = (q @ k.transpose(-1, -2)).softmax(-1)
        y = x + self.o((seen @ v).transpose(1, 2).flatten(2))
        return y, seen.flatten(0, 1) if self.flat else seen


@pytest.mark.parametrize(
    ("flat", "part"),
    [(False, Part(1, (HEADS,))), (True, Part(0, (HEADS,), repeated=True))],
    ids=["by head", "by sample"],
)
def test_what_heads_made_is_put_together_outside_of_the_block(flat, part):
    model = Watched(flat)
    found = infer(model)
    assert len(found.plan.styles) == 4
    assert found.division.results == {("0", 1): part}
    assert found.plan.attributes == {"0": {"config.num_attention_heads": 2}}
    assert model.config.num_attention_heads == HEADS


class Convolved(nn.Module):
    """A multi-layer perceptron with a convolution of each channel by itself in between."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 24), nn.Linear(24, WIDTH)
        self.mix = nn.Conv1d(24, 24, 3, padding=1, groups=24)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.mix(self.up(x).transpose(1, 2)).transpose(1, 2).relu())


def test_convolutions_of_single_channels_are_divided_with_the_layers_around_them():
    found = infer(Block(mlp=Convolved()))
    assert found.plan.styles == {"0.parts.mlp.up": "column", "0.parts.mlp.down": "row"}
    assert found.division.parts["0.parts.mlp.mix.weight"] == Part(0, (24,))
    assert found.plan.attributes == {"0.parts.mlp.mix": {"groups": 12, "in_channels": 12, "out_channels": 12}}


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


def test_gradients_of_a_whole_layer_that_divided_activations_meet_are_summed():
    found = infer(Latent())
    assert found.plan.styles == {"0.q": "column", "0.v": "column", "0.o": "row", "0.norm": "summed"}
    assert found.division.spreads == {"0.narrow"}
    assert found.division.enters == {"0.q"}
    assert found.summed == {"0.norm.weight", "0.norm.bias"}
