"""What the search for inf and NaN costs a step in which nothing happens, counted: no operation, and hardly a call."""

import gc
import math
import sys

import pytest
from hybridpp_plugins import step_epilogue
from hybridpp_plugins.nonfinite_steps import NonFiniteSteps
from support import boosted, image_batch, model_loss, sgd, tiny_vit
from torch.utils._python_dispatch import TorchDispatchMode

from hybridpp.cluster import Loopback

BATCH = image_batch(6)


class Operations(TorchDispatchMode):
    """Lists every operation of torch's."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def num_calls(step):
    """How many functions of Python and of C a step calls on this thread."""
    count = 0

    def note(frame, event, argument):
        nonlocal count
        count += event in ("call", "c_call")

    gc.disable()
    sys.setprofile(note)
    try:
        step()
    finally:
        sys.setprofile(None)
        gc.enable()
    return count


def cost(by_hand, prepare=lambda booster, model: None, **settings):
    """The operations of a step, and its number of calls."""

    def run():
        booster, model, optimizer = boosted(
            tiny_vit(num_layers=12), sgd, image_batch(2), num_microbatches=3, **settings
        )
        prepare(booster, model)

        def step():
            if by_hand:
                booster.backward(model(**BATCH).loss, optimizer)
            else:
                booster.execute_pipeline(iter([BATCH]), model, model_loss, optimizer)
            optimizer.step()

        for _ in range(4):  # the last one looks again at what the first one did
            step()
        with Operations() as operations:
            step()
        assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
        return operations.names, num_calls(step)

    return Loopback(1).run(run)[0]


def unchecked(batch, result, losses):
    shares = [microbatch.share for microbatch in batch.microbatches]
    total = math.fsum(value * share for value, share in zip(losses, shares, strict=True))
    return step_epilogue.RankLoss(total, 0.0, -1.0)


@pytest.mark.covering
@pytest.mark.parametrize("precision", ["fp16", "bf16", "fp32"])
@pytest.mark.parametrize("by_hand", [False, True])
def test_no_operation_and_hardly_a_call(precision, by_hand, monkeypatch):
    settings = {"precision": precision, "max_norm": 1.0, "initial_scale": 8.0}
    operations, calls = cost(by_hand, **settings)
    monkeypatch.setattr(step_epilogue, "_rank_loss", unchecked)
    monkeypatch.setattr(NonFiniteSteps, "wants_search", lambda self, norm: False)

    def prepare(booster, model):
        booster.plugin._engine(model).staged.around_call = None

    bare_operations, bare_calls = cost(by_hand, prepare, **settings)
    # Of a call by the script, references are kept: its gradients pass through a hook that does no more.
    assert operations == bare_operations
    assert bare_calls > 1000
    assert calls <= 1.02 * bare_calls, (calls, bare_calls)


def test_an_operation_more_is_seen():
    def prepare(booster, model):
        # Many, because a gradient with a hook takes another way, of fewer calls.
        model.classifier.bias.register_hook(lambda gradient: [gradient.isfinite() for _ in range(500)] and None)

    operations, calls = cost(False)
    more, more_calls = cost(False, prepare)
    assert len(more) > len(operations)
    assert more_calls > calls
