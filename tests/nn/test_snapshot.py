import pytest
import torch
from torch import nn

from hybridpp.nn.snapshot import (
    MISSING,
    Replacements,
    Snapshot,
    preserved_buffer_values,
    preserved_modules,
    put_entry,
)


class Thing:
    def __init__(self, **attributes):
        vars(self).update(attributes)


def test_what_objects_hold_is_put_back():
    inner = Thing(tensor=torch.ones(1))
    thing = Thing(items=[1, inner], names={"a": (inner,)}, module=nn.Linear(1, 1))
    thing.itself = thing
    state = Snapshot.reachable_from(((thing,), {"x": torch.ones(1)}))
    module, tensor = thing.module, inner.tensor
    thing.items.append(3)
    thing.names.clear()
    thing.module = inner.tensor = None
    inner.new = 1
    state.restore()
    assert (thing.items, thing.names, thing.module) == ([1, inner], {"a": (inner,)}, module)
    assert vars(inner) == {"tensor": tensor}


def test_only_as_many_levels_as_asked_for_are_in_a_snapshot():
    inner = Thing(count=1)
    thing = Thing(inner=inner, items=[1])
    shallow, deep = Snapshot.reachable_from([thing], num_levels=1), Snapshot.reachable_from([thing])
    inner.count = 2
    assert not shallow.has_changed()
    assert deep.has_changed()
    deep.restore()
    assert inner.count == 1
    assert not deep.has_changed()


def test_the_tensors_of_a_snapshot_are_those_that_were_held():
    tensor = torch.ones(1)
    thing = Thing(first=tensor, pair=(torch.ones(1),))
    snapshot = Snapshot.reachable_from([thing])
    thing.first = torch.zeros(1)
    assert [held is tensor for held in snapshot.tensors()] == [True]


def change_everything(model):
    model.train(not model.training)
    model[0].weight = nn.Parameter(torch.zeros(1, 1))
    del model[0].bias
    model[1].running_mean = torch.ones(1)
    model[1].register_buffer("late", torch.ones(1))
    model[0].register_forward_hook(lambda *_: None)
    model[0].losses.append(torch.ones(1))
    model[0].counts["calls"] = 2
    model.add_module("more", nn.Linear(1, 1))
    model[0].forward = lambda x: x


def state_of(model):
    """What every module holds, containers copied; tensors and hooks by identity."""
    return [
        (path, {k: list(v.items()) if isinstance(v, dict) else [*v] if isinstance(v, list) else v for k, v in held})
        for path, module in model.named_modules()
        for held in [list(vars(module).items())]
    ]


def small_model():
    model = nn.Sequential(nn.Linear(1, 1), nn.BatchNorm1d(1))
    model[0].losses, model[0].counts = [], {"calls": 1}
    model[0].register_forward_pre_hook(lambda *_: None)
    return model


def test_modules_hold_afterwards_what_they_held_before():
    model = small_model()
    before = state_of(model)
    with preserved_modules(model):
        change_everything(model)
        assert state_of(model) != before
    assert state_of(model) == before


def fail_within(model):
    with preserved_modules(model):
        change_everything(model)
        raise ZeroDivisionError


def test_modules_are_put_back_after_an_error():
    model = small_model()
    before = state_of(model)
    with pytest.raises(ZeroDivisionError):
        fail_within(model)
    assert state_of(model) == before


class Named(dict):
    """A container whose class has rules of its own."""

    def clear(self):
        raise AssertionError("no rule of the class is asked")

    def __len__(self):
        raise AssertionError("no rule of the class is asked")


def test_what_was_empty_has_changed_when_it_is_filled():
    model = small_model()
    model[0].names = Named()
    for fill in (lambda: model[0].losses.append(1), lambda: dict.update(model[0].names, a=1)):
        snapshot = Snapshot.of_modules(model)
        assert not snapshot.has_changed()
        fill()
        assert snapshot.has_changed()
        snapshot.restore()
        assert not snapshot.has_changed()
        assert not model[0].losses
        assert not list(dict.keys(model[0].names))


def test_buffers_have_their_values_again_and_stay_the_same_tensors():
    model = nn.BatchNorm1d(1)
    buffer = model.running_mean
    with preserved_buffer_values(model):
        model(torch.tensor([[1.0], [5.0]]))
        assert buffer.item() != 0
    assert model.running_mean is buffer
    assert buffer.item() == 0
    assert model.num_batches_tracked.item() == 0


def test_replaced_entries_are_put_back_in_turn():
    held = {"a": 1}
    replaced = Replacements()
    replaced.put(held, "a", 2)
    replaced.put(held, "a", 3)
    replaced.put(held, "b", 4)
    assert held == {"a": 3, "b": 4}
    replaced.restore()
    assert held == {"a": 1}


def test_what_others_put_meanwhile_stays_where_that_is_asked_for():
    held = {"a": 1, "b": 2, "c": 3}
    replaced = Replacements()
    for key in held:
        replaced.put(held, key, 0.5)
    held["a"] = 5
    del held["b"]
    replaced.restore(keep_newer=True)
    assert held == {"a": 5, "c": 3}


def test_an_entry_that_was_missing_is_removed():
    held = {"a": 1}
    put_entry(held, "a", MISSING)
    put_entry(held, "a", MISSING)
    assert held == {}
