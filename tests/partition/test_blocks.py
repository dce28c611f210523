import copy

import pytest
import torch
from support import boosted, gradients_of, sgd, tiny_vit
from torch import nn

from hybridpp.cluster import Loopback
from hybridpp.partition import describe_cut, find_units
from hybridpp.partition.blocks import finest_units


class Model(nn.Module):
    """The modules given by name; its forward does not matter here."""

    def __init__(self, **modules):
        super().__init__()
        for name, module in modules.items():
            self.add_module(name, module)


def layers(number, width=8):
    return [nn.Linear(width, width) for _ in range(number)]


def swin_like():
    """Stages of blocks, as in hierarchical vision models."""
    return nn.ModuleList([Model(blocks=nn.ModuleList(layers(n, w)), down=nn.Linear(w, w)) for n, w in [(2, 4), (6, 8)]])


def test_a_transformer_is_cut_between_its_layers():
    units = find_units(tiny_vit(num_layers=3), 2)
    assert units.blocks == ("vit.layers.0", "vit.layers.1", "vit.layers.2")
    assert units.units == ("vit.embeddings", *units.blocks, "vit.layernorm", "classifier")


@pytest.mark.parametrize(
    ("model", "num_stages", "blocks"),
    [
        (nn.Sequential(*layers(3)), 2, "0 1 2"),
        (Model(a=nn.Linear(2, 2), b=nn.Linear(2, 2)), 2, "a b"),
        (
            Model(encoder=nn.ModuleList(layers(2)), decoder=nn.ModuleList(layers(2))),
            2,
            "encoder.0 encoder.1 decoder.0 decoder.1",
        ),
        # A head that happens to be a Sequential stays whole.
        (Model(body=nn.ModuleList(layers(3, 20)), head=nn.Sequential(*layers(2, 2))), 2, "body.0 body.1 body.2"),
        (Model(body=swin_like()), 2, "body.0 body.1"),
        # A list of lists: none of them is ever called, only what is in them.
        (
            Model(body=nn.ModuleList([nn.ModuleList(layers(2)) for _ in range(2)])),
            2,
            "body.0.0 body.0.1 body.1.0 body.1.1",
        ),
        # Only as fine as it must be: the largest block first.
        (Model(body=swin_like()), 3, "body.0 " + " ".join(f"body.1.blocks.{n}" for n in range(6))),
        (
            Model(body=swin_like()),
            8,
            "body.0.blocks.0 body.0.blocks.1 " + " ".join(f"body.1.blocks.{n}" for n in range(6)),
        ),
    ],
)
def test_blocks(model, num_stages, blocks):
    assert find_units(model, num_stages).blocks == tuple(blocks.split())


def test_what_stands_beside_blocks_inside_a_container_is_a_unit():
    units = find_units(Model(embed=nn.Linear(1, 1), body=swin_like(), norm=nn.LayerNorm(2)), 3)
    assert units.units == (
        "embed",
        "body.0",
        *(f"body.1.blocks.{n}" for n in range(6)),
        "body.1.down",
        "norm",
    )


@pytest.mark.parametrize("num_stages", [1, 2, 3])
def test_units_and_what_is_in_them_are_the_whole_model_without_overlap(num_stages):
    model = Model(embed=nn.Embedding(3, 4), body=swin_like(), head=nn.Sequential(*layers(2, 2)))
    units = find_units(model, num_stages).units
    found = [id(parameter) for unit in units for parameter in model.get_submodule(unit).parameters()]
    assert sorted(found) == sorted(map(id, model.parameters()))


def test_units_beside_the_blocks_are_modules_that_can_be_called():
    small = nn.ModuleDict({"a": nn.ModuleList(layers(2, 1)), "b": nn.Linear(1, 1)})
    units = find_units(Model(body=nn.ModuleList(layers(2)), small=small), 2)
    assert units.units == ("body.0", "body.1", "small.a.0", "small.a.1", "small.b")


def test_a_module_registered_twice_is_one_unit_under_its_first_name():
    shared = nn.Linear(2, 2)
    model = Model(first=shared, body=nn.ModuleList(layers(2)), again=shared)
    assert find_units(model, 2).units == ("first", "body.0", "body.1")


@pytest.mark.parametrize(
    ("model", "num_stages", "blocks"),
    [
        (Model(body=nn.ModuleList(layers(2))), 3, "body.0 body.1"),
        (nn.Linear(2, 2), 2, ""),
    ],
)
def test_a_model_with_fewer_blocks_than_stages_gets_the_finest_cut(model, num_stages, blocks):
    assert find_units(model, num_stages).blocks == tuple(blocks.split())


class TwoTowers(nn.Module):
    """Reads with the small tower; the large one, which would draw, never runs."""

    def __init__(self, dropout=0.0):
        super().__init__()
        self.draw = nn.ModuleDict({"up": nn.ModuleList(layers(3, 100)), "down": nn.ModuleList(layers(3, 100))})
        one, two = layers(2, 4)
        layer = nn.Sequential(one, nn.Dropout(dropout), two)
        self.read = Model(embed=nn.Linear(4, 4), layers=nn.ModuleList(copy.deepcopy(layer) for _ in range(4)))

    def forward(self, x):
        x = self.read.embed(x)
        for layer in self.read.layers:
            x = x + layer(x)
        return x


SAMPLE = ((torch.ones(2, 4),), {})


@pytest.mark.parametrize(
    ("num_stages", "calls"),
    [
        (2, "embed layers.0 layers.1 | layers.2 layers.3"),
        (4, "embed layers.0 | layers.1 | layers.2 | layers.3"),
        # Too few blocks: those that do not run are not counted, and not split.
        (6, "embed layers.0.0 | layers.0.1 | layers.0.2 | layers.1 | layers.2 | layers.3"),
    ],
)
def test_a_large_tower_that_never_runs_does_not_hide_the_other_blocks(num_stages, calls):
    cut = describe_cut(TwoTowers(), num_stages, SAMPLE)
    assert " | ".join(" ".join(summary.calls) for summary in cut).replace("read.", "") == calls


def test_two_towers_train_as_in_one_process_dropout_included():
    batch = {"x": torch.randn(4, 4, generator=torch.Generator().manual_seed(0))}

    def step(pp_size):
        def run():
            torch.manual_seed(0)
            booster, model, optimizer = boosted(TwoTowers(0.5), sgd, batch, pp_size=pp_size, num_microbatches=2)
            loss = booster.execute_pipeline(iter([batch]), model, lambda y, _: y.square().mean(), optimizer)["loss"]
            return loss, gradients_of(booster, model)

        ranks = Loopback(pp_size).run(run)
        return ranks[0][0], {name: value for _, owned in ranks for name, value in owned.items()}

    loss, expected = step(1)
    for pp_size in (2, 4):
        cut_loss, gradients = step(pp_size)
        assert cut_loss == loss
        for name, gradient in expected.items():
            assert torch.equal(gradients[name], gradient), name


def test_blocks_are_sought_among_the_parameters_that_are_used():
    model = TwoTowers()
    used = {name for name, _ in model.named_parameters() if name.startswith("read") and "layers.1" not in name}
    assert find_units(model, 2).blocks == tuple(f"draw.{name}.{n}" for name in ("up", "down") for n in range(3))
    assert find_units(model, 2, used=used).blocks == ("read.layers.0", "read.layers.2", "read.layers.3")
    assert find_units(model, 2, used=set()).blocks == ()


def test_a_model_without_executed_lists_is_cut_between_executed_children():
    model = Model(draw=nn.ModuleList(layers(2)), a=nn.Linear(2, 2), b=nn.Linear(2, 2))
    assert find_units(model, 2, used={"a.weight", "b.weight"}).blocks == ("a", "b")


@pytest.mark.parametrize("num_stages", [1, 2, 5])
@pytest.mark.parametrize("used", [None, {"read"}, {"draw.up", "read.layers"}])
def test_every_unit_is_made_of_finest_units(num_stages, used):
    model = TwoTowers()
    names = {name for name, _ in model.named_parameters() if used and name.startswith(tuple(used))}
    finest = finest_units(model)
    for unit in find_units(model, num_stages, used=names if used else None).units:
        inside = [name for name in finest if f"{name}.".startswith(f"{unit}.")]
        assert sum(len(list(model.get_submodule(name).parameters())) for name in inside) == len(
            list(model.get_submodule(unit).parameters())
        )
        assert inside
