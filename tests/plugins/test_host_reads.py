"""How often the host looks at the device's numbers in a step: each time it would wait for all that was started."""

import sys
from pathlib import Path

import pytest
import torch
from support import boosted, image_batch, model_loss, sgd, small_vit
from torch.overrides import TorchFunctionMode

from hybridpp.cluster import Loopback

_READS = {"item", "tolist", "numpy", "__bool__", "__float__", "__int__", "__index__", "cpu", "nonzero"}
# These read batches, or messages of the control group: both are in host memory on every machine.
_HOST_ONLY = {"batch.py:digest", "gather_numbers.py:_receive", "loss_items.py:numbers"}
# These ask first whether a tensor is in host memory; what is on a device is read with the losses, or a step later.
_HOST_ONLY |= {"loss_graph.py:_number", "write_watch.py:written"}


def _reads_generators(frame):
    """Whether the state of a generator is read, which is in host memory everywhere."""
    while frame is not None and not frame.f_code.co_filename.endswith("/random_draws.py"):
        frame = frame.f_back
    return frame is not None


class Reads(TorchFunctionMode):
    """Notes the place in hybridpp of everything that reads numbers of the device on the host."""

    def __init__(self):
        super().__init__()
        self.places = []

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if getattr(function, "__name__", "") in _READS:
            frame = sys._getframe(1)
            if _reads_generators(frame):
                return function(*args, **(kwargs or {}))
            # Since Python 3.12, list comprehensions have no frame.
            while "/hybridpp" not in frame.f_code.co_filename or frame.f_code.co_name == "<listcomp>":
                frame = frame.f_back
            place = f"{Path(frame.f_code.co_filename).name}:{frame.f_code.co_name}"
            if place not in _HOST_ONLY:
                self.places.append(place)
        return function(*args, **(kwargs or {}))


def places(pp_size=1, calls=1, behind=lambda model: None, **settings):
    """Where each rank reads the device in one step, after those that may do more: the first and the fourth."""

    def run():
        booster, model, optimizer = boosted(
            small_vit(), sgd, image_batch(2), pp_size=pp_size, num_microbatches=3, **settings
        )
        for _ in range(3):
            with Reads() as reads:
                for _ in range(calls):
                    booster.execute_pipeline(iter([image_batch(6)]), model, model_loss, optimizer)
                behind(model)
                optimizer.step()
        return reads.places

    return Loopback(pp_size).run(run)


BOTH = LOSSES = ["host_copy.py:read"]


@pytest.mark.covering("precision settings")
@pytest.mark.parametrize("settings", [{}, {"max_norm": 1.0}, {"schedule": "zb-h1"}])
@pytest.mark.parametrize("precision", ["fp16", "bf16", "fp32"])
@pytest.mark.parametrize("pp_size", [1, 2])
def test_a_step_reads_the_device_at_most_once(precision, settings, pp_size):
    *others, last = places(pp_size, precision=precision, **settings)
    needs_norm = precision == "fp16" or "max_norm" in settings
    assert last == (BOTH if needs_norm else LOSSES), "losses and norms together"
    assert others == [BOTH if needs_norm else []] * (pp_size - 1)


def test_fp32_reads_it_once_more_where_a_gradient_was_changed_by_hand():
    def scale(model):
        next(model.parameters()).grad.mul_(2.0)

    assert places(precision="fp32", max_norm=1.0, behind=scale) == [[*BOTH, "gradient_norm.py:gather"]]


def test_accumulating_calls_read_it_once_each():
    assert places(precision="fp16", calls=2) == [BOTH * 2]


@pytest.mark.parametrize(("precision", "max_norm"), [("fp16", 0.0), ("fp16", 1.0), ("bf16", 1.0)])
def test_all_ranks_of_a_step_agree_in_two_messages(precision, max_norm):
    """Before it on the batch, behind it on losses, norm and overflow; over tp, pp and dp alike."""

    def run():
        booster, model, optimizer = boosted(
            small_vit(), sgd, image_batch(2), tp_size=2, pp_size=2, precision=precision, max_norm=max_norm
        )
        control, count = booster.plugin.layout.control, 0
        gather = control.start_all_gather

        def counted(tensor):
            nonlocal count
            count += 1
            return gather(tensor)

        control.start_all_gather = counted
        counts = []
        for _ in range(2):
            count = 0
            booster.execute_pipeline(iter([image_batch(2)]), model, model_loss, optimizer)
            before = count
            optimizer.step()
            counts.append((before, count - before))
        return counts

    assert Loopback(8).run(run) == [[(2, 0)] * 2] * 8


def test_a_read_is_noticed():
    with Reads() as reads:
        run = compile("def run(value): return value.item()", "/hybridpp/made_up.py", "exec")
        scope = {}
        exec(run, scope)
        scope["run"](torch.ones(1))
    assert reads.places == ["made_up.py:run"]
