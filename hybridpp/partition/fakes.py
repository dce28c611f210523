"""Fake tensors that replace a model's parameters and buffers during a trace."""

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from hybridpp.nn.snapshot import preserved_modules
from hybridpp.nn.torch_private import FAKE_TENSOR_LOG, FakeTensorMode, buffers_of, fake_like, parameters_of


class Fakes:
    """A fake for every parameter and buffer of a model; nothing is allocated.

    The model itself is traced, not a copy: whatever was done to the instance (a patched forward, hooks) counts. It may
    be pruned later; there are fakes for all of its tensors still.

    Args:
        model: on any device, also the meta device.
        device: device of the fakes.
        dtypes: of the fakes of tensors that will be cast, by the tensor's ``id``.

    Attributes:
        names: the name of each fake parameter, by ``id``; a tied parameter has its first name.
        parameters: the fake parameters.
        buffers: the fake buffers.
        originals: the buffers of the fakes, by ``id`` of the fake.
        slots: where each fake is held: the module, its name there, the fake.
    """

    def __init__(self, model: nn.Module, device: torch.device, dtypes: Mapping[int, torch.dtype]):
        mode = self._mode = FakeTensorMode(allow_non_fake_inputs=True)
        self._model, self._device = model, device
        fakes = {
            id(tensor): fake_like(mode, tensor, dtypes.get(id(tensor), tensor.dtype), device)
            for tensor in (*model.parameters(), *model.buffers())
        }
        self.names = {id(fakes[id(parameter)]): name for name, parameter in model.named_parameters()}
        self.parameters = [fakes[id(parameter)] for parameter in model.parameters()]
        self.buffers = [fakes[id(buffer)] for buffer in model.buffers()]
        self.originals = {id(fakes[id(buffer)]): buffer for buffer in model.buffers()}
        self.slots: list[tuple[nn.Module, str, Tensor]] = [
            (module, key, fakes[id(tensor)])
            for module in model.modules()
            for key, tensor in (*parameters_of(module).items(), *buffers_of(module).items())
            if tensor is not None
        ]

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Inside, the model holds the fakes; afterwards, what it held before."""
        with preserved_modules(self._model):
            for module, key, fake in self.slots:
                # Pruned tensors are plain attributes, and must be parameters or buffers again. All are set anew, so
                # that a module's tensors have the order in which they were registered.
                del _owning_dict(module, key)[key]
                owner: dict[str, Any] = parameters_of(module) if isinstance(fake, nn.Parameter) else buffers_of(module)
                owner[key] = fake
            yield

    def renew(self) -> None:
        """Update the fakes of buffers that the forward has replaced, such as tables that grow with the inputs."""
        is_new = False
        for index, (module, key, fake) in enumerate(self.slots):
            buffer = _owning_dict(module, key)[key]
            original = self.originals.get(id(fake))
            if original is None or buffer is original or not isinstance(buffer, Tensor):
                continue
            if buffer.shape != fake.shape:
                fake = fake_like(self._mode, buffer, fake.dtype, self._device)
                self.slots[index] = (module, key, fake)
                is_new = True
            self.originals[id(fake)] = buffer
        if is_new:
            # Drop fakes that are no longer used.
            self.buffers = list({id(fake): fake for _, _, fake in self.slots if id(fake) in self.originals}.values())
            self.originals = {id(fake): self.originals[id(fake)] for fake in self.buffers}


# Largest number of entries (of 1 to 2 KB) in torch's cache of the results of operations on fakes, per process.
_MAX_CACHED = 8192


def bound_cache() -> None:
    """Empty torch's global cache for fakes if it has grown large: it keeps an entry for every shape."""
    if len(FakeTensorMode.cache) > _MAX_CACHED:
        FakeTensorMode.cache_clear()


@contextmanager
def quiet() -> Iterator[None]:
    """Suppress torch's log of operations that fakes do not support: torch also raises, and the trace has a fallback."""
    log = FAKE_TENSOR_LOG

    # A filter for each caller: in-process ranks take turns here, and leave in another order than they entered.
    def drop(record: logging.LogRecord) -> bool:
        return False

    log.addFilter(drop)
    try:
        yield
    finally:
        log.removeFilter(drop)


def _owning_dict(module: nn.Module, key: str) -> dict[str, Any]:
    """The dict that holds a tensor of a module: a pruned tensor is a plain attribute."""
    dicts: tuple[dict[str, Any], ...] = (parameters_of(module), buffers_of(module), module.__dict__)
    return next(held for held in dicts if key in held)
