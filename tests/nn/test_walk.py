"""Walks list what torch's methods list."""

from typing import Any

import pytest
import torch
from support import tiny_vit
from torch import nn

from hybridpp.nn import walk
from hybridpp.partition.absent import ParameterVisibility
from hybridpp.partition.prune import prune_parameters

NAMED = ("named_modules", "named_parameters", "named_buffers")
ALL = (*NAMED, "modules", "parameters", "buffers")


class OnlyTrains(nn.Module):
    """A model that lists the parameters that train, and no others."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(2, 2).requires_grad_(False), nn.Linear(2, 2)

    def named_parameters(self, *args: Any, **kwargs: Any) -> Any:
        return ((name, held) for name, held in super().named_parameters(*args, **kwargs) if held.requires_grad)


class Hides(nn.Module):
    """A module that lists no module but itself."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 2)

    def named_modules(self, memo: Any = None, prefix: str = "", remove_duplicate: bool = True) -> Any:
        yield prefix, self


def tied() -> nn.Module:
    shared = nn.BatchNorm1d(2)
    model = nn.Sequential(shared, nn.Sequential(nn.Linear(2, 2), shared), nn.Linear(2, 2), nn.Sequential())
    model[2].weight = model[1][0].weight
    model.register_buffer("table", shared.running_mean)
    model.register_parameter("absent", None)
    model.add_module("none", None)
    return model


def pruned() -> tuple[nn.Module, ParameterVisibility]:
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.Linear(2, 2))
    owners = {name: (0 if name.startswith("2") else 1,) for name, _ in model.named_parameters()}
    return model, prune_parameters(model, owners, (0,), {"0", "1"}, torch.device("cpu"), {})


def same(found: Any, expected: Any) -> bool:
    pairs = [part if isinstance(part, tuple) else ("", part) for part in found]
    others = [part if isinstance(part, tuple) else ("", part) for part in expected]
    return [(name, id(held)) for name, held in pairs] == [(name, id(held)) for name, held in others]


@pytest.mark.parametrize("method", ALL)
@pytest.mark.parametrize(
    "make",
    [tiny_vit, tied, OnlyTrains, Hides, lambda: nn.Sequential(Hides(), OnlyTrains(), nn.Linear(2, 2)), nn.Identity],
)
def test_a_walk_lists_what_torch_lists_in_its_order(make, method):
    model = make()
    assert same(getattr(walk, method)(model), getattr(model, method)())


@pytest.mark.parametrize("method", ALL)
def test_a_walk_sees_of_a_pruned_model_what_torch_sees(method):
    model, visibility = pruned()
    assert same(getattr(walk, method)(model), getattr(model, method)())
    with visibility.showing_all():
        assert len(walk.parameters(model)) == 6
        assert same(getattr(walk, method)(model), getattr(model, method)())


def test_a_method_that_a_script_set_on_the_model_counts():
    model = nn.Linear(2, 2)
    model.named_parameters = lambda: [("own", model.weight)]  # type: ignore[method-assign,assignment]
    assert [name for name, _ in walk.named_parameters(model)] == ["own"]


@pytest.mark.parametrize("make", [tiny_vit, tied])
def test_a_submodule_is_the_one_that_torch_finds(make):
    model = make()
    assert all(walk.submodule(model, name) is model.get_submodule(name) for name, _ in model.named_modules())
    with pytest.raises(AttributeError, match="nowhere"):
        walk.submodule(model, "nowhere")
