"""Which parts of a forward draw random numbers, by mode."""

from torch import nn

from hybridpp.partition import drawing_parts
from hybridpp.partition.drawing_parts import DrawingParts


def block():
    return nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.0))


def test_training_flags_rates_and_gradients_make_the_mode():
    model = nn.Sequential(block(), block())
    parts = DrawingParts(model)
    first = parts.now(0, True)
    assert parts.now(0, True) is first
    assert parts.now(0, False) is not first
    assert parts.now(1, True) is not first
    model[1][1].eval()
    inner = parts.now(0, True)
    assert inner is not first
    model[1][1].train()
    model[0][1].p = 0.5
    assert parts.now(0, True) is not first
    model[0][1].p = 0.0
    assert parts.now(0, True) is first


def test_numbers_that_are_no_rates_do_not_change_the_mode():
    model = block()
    model.latest_loss = 0.5
    parts = DrawingParts(model)
    first = parts.now(0, True)
    model.latest_loss = 0.25
    assert parts.now(0, True) is first


def test_old_modes_are_dropped(monkeypatch):
    monkeypatch.setattr(drawing_parts, "_MAX_MODES", 2)
    model = block()
    parts = DrawingParts(model)
    first = parts.now(0, True)
    first[1] = True
    for rate in (0.1, 0.2):
        model[1].p = rate
        parts.now(0, True)
    model[1].p = 0.0
    assert parts.now(0, True) == {}
