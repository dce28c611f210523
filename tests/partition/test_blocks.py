import pytest
from support import tiny_vit
from torch import nn

from hybridpp.partition import dissect


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
    anatomy = dissect(tiny_vit(num_layers=3), 2)
    assert anatomy.blocks == ("vit.layers.0", "vit.layers.1", "vit.layers.2")
    assert anatomy.units == ("vit.embeddings", *anatomy.blocks, "vit.layernorm", "classifier")


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
    assert dissect(model, num_stages).blocks == tuple(blocks.split())


def test_what_stands_beside_blocks_inside_a_container_is_a_unit():
    anatomy = dissect(Model(embed=nn.Linear(1, 1), body=swin_like(), norm=nn.LayerNorm(2)), 3)
    assert anatomy.units == (
        "embed",
        "body.0",
        *(f"body.1.blocks.{n}" for n in range(6)),
        "body.1.down",
        "norm",
    )


@pytest.mark.parametrize("num_stages", [1, 2, 3])
def test_units_and_what_is_in_them_are_the_whole_model_without_overlap(num_stages):
    model = Model(embed=nn.Embedding(3, 4), body=swin_like(), head=nn.Sequential(*layers(2, 2)))
    units = dissect(model, num_stages).units
    found = [id(parameter) for unit in units for parameter in model.get_submodule(unit).parameters()]
    assert sorted(found) == sorted(map(id, model.parameters()))


def test_units_beside_the_blocks_are_modules_that_can_be_called():
    small = nn.ModuleDict({"a": nn.ModuleList(layers(2, 1)), "b": nn.Linear(1, 1)})
    anatomy = dissect(Model(body=nn.ModuleList(layers(2)), small=small), 2)
    assert anatomy.units == ("body.0", "body.1", "small.a.0", "small.a.1", "small.b")


def test_a_module_registered_twice_is_one_unit_under_its_first_name():
    shared = nn.Linear(2, 2)
    model = Model(first=shared, body=nn.ModuleList(layers(2)), again=shared)
    assert dissect(model, 2).units == ("first", "body.0", "body.1")


@pytest.mark.parametrize(
    ("model", "num_stages", "blocks"),
    [
        (Model(body=nn.ModuleList(layers(2))), 3, "body.0 body.1"),
        (nn.Linear(2, 2), 2, ""),
    ],
)
def test_a_model_with_fewer_blocks_than_stages_is_cut_as_finely_as_it_can_be(model, num_stages, blocks):
    assert dissect(model, num_stages).blocks == tuple(blocks.split())
