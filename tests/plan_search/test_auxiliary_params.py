"""What is found beside layers: tables and arguments by head or channel, norms of all, experts, further results."""

from types import SimpleNamespace

import pytest
import torch
from attention_blocks import HEAD, HEADS, WIDTH, Attention, Block, Gated, Shaped, infer
from torch import Tensor, nn
from torch.nn import functional

from hybridpp.sharding_plan.sharding_spec import DimShard


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


class Normed(Attention):
    """Beside a scale for each of two heads a norm per head, of a size that might be a number of heads, too."""

    def __init__(self) -> None:
        super().__init__(num_heads=2, kv_heads=2)
        self.head_dim = 8
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.scales, self.head_norm = nn.Parameter(torch.randn(2)), nn.LayerNorm(8)

    def forward(self, x: Tensor) -> Tensor:
        q = self.head_norm(self.heads(self.q(x), self.num_heads)) * self.scales[:, None, None]
        k, v = self.heads(self.k(x), self.kv_heads), self.heads(self.v(x), self.kv_heads)
        return self.o(functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


def test_head_counts_stated_by_attributes_are_the_only_candidates():
    found = infer(Block(attention=Normed()))
    assert found.spec.params["0.parts.attention.scales"] == DimShard(0, (2,))
    assert found.styles["0.parts.attention.head_norm"] == "partial_grad"


def test_shared_heads_are_copied_beside_what_there_is_for_every_head():
    found = infer(Block(attention=Scaled()), 4)
    styles = {"q": "column", "k": "column:2", "v": "column:2", "gate": "column", "o": "row"}
    assert found.styles == {f"0.parts.attention.{name}": style for name, style in styles.items()}
    assert found.spec.params["0.parts.attention.scales"] == DimShard(0, (HEADS,))


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
        ({"bias": torch.randn(1, HEADS, 5, 5)}, DimShard(1, (HEADS,))),
        ({"slopes": torch.randn(3 * HEADS, 1, 5)}, DimShard(0, (HEADS,), repeated=True)),
    ],
    ids=["table", "argument", "argument of all samples"],
)
def test_tables_and_arguments_that_are_indexed_by_head_are_divided_too(given, part):
    found = infer(Biased(), 2, torch.randn(3, 5, WIDTH), **given)
    assert len(found.styles) == 4
    assert found.spec.params["0.table.weight"] == DimShard(1, (HEADS,))
    assert found.spec.arguments == ({} if part is None else {("0", 1): part})


class PerLayer(nn.Module):
    """A narrow layer whose gate is another argument, made for this block alone."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 8), nn.Linear(8, WIDTH)

    def forward(self, x: Tensor, given: Tensor) -> Tensor:
        return x + self.down(self.up(x).relu() * given)


def test_an_argument_that_gates_what_is_divided_is_divided_too():
    found = infer(PerLayer(), 2, torch.randn(3, 5, WIDTH), torch.randn(3, 5, 8, requires_grad=True))
    assert found.styles == {"0.up": "column", "0.down": "row"}
    assert found.spec.arguments == {("0", 1): DimShard(2, (8,))}


def test_a_norm_over_the_width_of_all_heads_is_given_all_of_it():
    found = infer(Block(attention=Attention(norm=WIDTH)))
    assert found.styles["0.parts.attention.q"] == "column"
    assert found.styles["0.parts.attention.norm"] == "partial_grad"
    assert found.spec.gather_inputs == {"0.parts.attention.norm": DimShard(-1, (WIDTH,))}
    assert not found.reasons


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
    assert found.styles["0.parts.attention.k"] == "column:2"
    assert found.spec.gather_inputs == {"0.parts.attention.k_norm": DimShard(-1, (2 * HEAD,), (2,))}


class Convolved(nn.Module):
    """A multi-layer perceptron with a convolution of each channel by itself in between."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 24), nn.Linear(24, WIDTH)
        self.mix = nn.Conv1d(24, 24, 3, padding=1, groups=24)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.mix(self.up(x).transpose(1, 2)).transpose(1, 2).relu())


def test_depthwise_convolutions_are_sharded_with_the_layers_around_them():
    found = infer(Block(mlp=Convolved()))
    assert found.styles == {"0.parts.mlp.up": "column", "0.parts.mlp.down": "row"}
    assert found.spec.params["0.parts.mlp.mix.weight"] == DimShard(0, (24,))
    assert found.spec.attributes == {
        ("0.parts.mlp.mix", "groups"): 12,
        ("0.parts.mlp.mix", "in_channels"): 12,
        ("0.parts.mlp.mix", "out_channels"): 12,
    }


class Linear(nn.Module):
    """Attention without softmax, behind a convolution of the fused keys, queries and wider values; a decay per head."""

    def __init__(self, fused: bool) -> None:
        super().__init__()
        self.num_k_heads, self.num_v_heads, self.head_k_dim = HEADS, HEADS, 2
        self.key_dim, self.value_dim, self.fused = HEADS * 2, HEADS * 8, fused
        sizes = (2 * self.key_dim + self.value_dim,) if fused else (2 * self.key_dim, self.value_dim)
        self.inputs = nn.ModuleList(nn.Linear(WIDTH, size) for size in sizes)
        self.mix = nn.Conv1d(sum(sizes), sum(sizes), HEADS, padding=3, groups=sum(sizes))
        self.decay, self.norm = nn.Parameter(torch.randn(HEADS)), nn.LayerNorm(8)
        self.out = nn.Linear(self.value_dim, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        made = [layer(x) for layer in self.inputs]
        if not self.fused:  # by head, queries and keys in turn
            q, k = made[0].unflatten(-1, (self.num_k_heads, 2, self.head_k_dim)).unbind(-2)
            made = [q.flatten(-2), k.flatten(-2), made[1]]
        mixed = self.mix(torch.cat(made, -1).transpose(1, 2))[..., : x.shape[1]].transpose(1, 2)
        q, k, v = mixed.split([self.key_dim, self.key_dim, self.value_dim], -1)
        q, k = (part.unflatten(-1, (self.num_k_heads, -1)) for part in (q, k))
        scores = torch.einsum("bshd,bthd->bhst", q, k).tril() * self.decay[:, None, None]
        y = torch.einsum("bhst,bthd->bshd", scores, v.unflatten(-1, (self.num_v_heads, -1)))
        return x + self.out(self.norm(y).flatten(-2))


@pytest.mark.parametrize("fused", [True, False], ids=["as in its layer", "of two layers"])
def test_convolutions_of_fused_channels_are_divided_part_by_part(fused):
    found = infer(Linear(fused))
    assert len(found.styles) == (3 if fused else 4)
    assert found.styles["0.norm"] == "partial_grad"
    assert found.spec.params["0.mix.weight"] == DimShard(0, (8, 8, 32))
    assert found.spec.params["0.decay"] == DimShard(0, (HEADS,))
    own = {key: value for (name, key), value in found.spec.attributes.items() if name == "0"}
    assert own == {"num_k_heads": 2, "num_v_heads": 2, "key_dim": 4, "value_dim": 16}


def test_a_module_that_computes_with_a_width_argument_gets_the_local_width():
    found = infer(Block(attention=Shaped()))
    assert found.styles == {
        "0.parts.attention.qkv": "fused_column:concatenated:3",
        "0.parts.attention.out": "row",
    }
    assert found.spec.local_width_args == {("0.parts.attention", 0): WIDTH}


class Rotated(nn.Module):
    """Attention whose places are learnt outside of the block, and are the same for all heads."""

    def __init__(self) -> None:
        super().__init__()
        self.num_heads = HEADS
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor, places: Tensor) -> Tensor:
        q, k, v = (layer(x).view(*x.shape[:2], self.num_heads, HEAD) for layer in (self.q, self.k, self.v))
        q, k = (part * places[:, None] for part in (q, k))
        y = functional.scaled_dot_product_attention(*(part.transpose(1, 2) for part in (q, k, v)))
        return x + self.o(y.transpose(1, 2).flatten(2))


def test_gradients_of_an_argument_that_divided_activations_meet_are_summed():
    found = infer(Rotated(), 2, torch.randn(3, 5, WIDTH), torch.randn(5, HEAD, requires_grad=True))
    assert len(found.styles) == 4
    (part,) = found.spec.arguments.values()
    for places in (5, 7):
        assert part.index(1, 2, places).tolist() == list(range(places)), "each rank has all of it"


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
    assert found.styles == {"0.experts": "experts"}
    assert found.spec.attributes == {("0.experts", "inner_width"): 4}
    assert found.spec.params == {"0.experts.up": DimShard(1, (8, 8)), "0.experts.down": DimShard(2, (8,))}
    assert found.reasons == {"0.router": "its output leaves the block"}


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


def test_a_router_with_two_outputs_stays_replicated_beside_sharded_experts():
    found = infer(Routed())
    shared = {"0.shared.gate": "column", "0.shared.up": "column", "0.shared.down": "row"}
    assert found.styles == {"0.experts": "experts", **shared}
    assert found.reasons == {"0.router": "does not return one tensor"}


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
    [(False, DimShard(1, (HEADS,))), (True, DimShard(0, (HEADS,), repeated=True))],
    ids=["by head", "by sample"],
)
def test_what_heads_made_is_put_together_outside_of_the_block(flat, part):
    model = Watched(flat)
    found = infer(model)
    assert len(found.styles) == 4
    assert found.spec.results == {("0", 1): part}
    assert found.spec.attributes == {("0", "config.num_attention_heads"): 2}
    assert model.config.num_attention_heads == HEADS
