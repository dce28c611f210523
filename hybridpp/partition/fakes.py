"""A model without its numbers, for tracing: fake tensors take the place of its parameters and buffers for a while."""

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode


class Fakes:
    """A fake for every parameter and buffer of a model: nothing is allocated, and nothing made of them is real.

    The model itself is traced, not a copy: whatever was done to the instance (a patched forward, hooks) counts. It may
    be stripped of tensors later; the fakes still know all of them.

    Args:
        model: on any device, also the meta device.
        device: where the fakes pretend to be.
        dtypes: of the fakes that stand for tensors which will be cast, by the tensor's ``id``.

    Attributes:
        names: the name of each fake parameter, by ``id``; a tied parameter has its first name.
        parameters: the fake parameters.
        buffers: the fake buffers.
        originals: the buffers that they stand for, by ``id`` of the fake.
    """

    def __init__(self, model: nn.Module, device: torch.device, dtypes: Mapping[int, torch.dtype]):
        mode = self._mode = FakeTensorMode(allow_non_fake_inputs=True)
        self._device = device
        fakes: dict[int, Tensor] = {}
        with mode:
            for tensor in (*model.parameters(), *model.buffers()):
                dtype = dtypes.get(id(tensor), tensor.dtype)
                fake = torch.empty_strided(tensor.size(), tensor.stride(), dtype=dtype, device=device)
                is_parameter = isinstance(tensor, nn.Parameter)
                fakes[id(tensor)] = nn.Parameter(fake, requires_grad=tensor.requires_grad) if is_parameter else fake
        self.names = {id(fakes[id(parameter)]): name for name, parameter in model.named_parameters()}
        self.parameters = [fakes[id(parameter)] for parameter in model.parameters()]
        self.buffers = [fakes[id(buffer)] for buffer in model.buffers()]
        self.originals = {id(fakes[id(buffer)]): buffer for buffer in model.buffers()}
        self._slots: list[tuple[nn.Module, str, Tensor]] = [
            (module, key, fakes[id(tensor)])
            for module in model.modules()
            for key, tensor in (*module._parameters.items(), *module._buffers.items())
            if tensor is not None
        ]

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Inside, the model holds the fakes; afterwards what it held before."""
        self._renew()
        before = []
        try:
            for module, key, fake in self._slots:
                place = _place(module, key)
                before.append((module, place, key, place[key]))
                # What was stripped must be found among the parameters and buffers again.
                home: dict[str, Any] = module._parameters if isinstance(fake, nn.Parameter) else module._buffers
                if place is not home:
                    del place[key]
                home[key] = fake
            yield
        finally:
            for module, place, key, tensor in before:
                for other in (module._parameters, module._buffers):
                    if other is not place:
                        other.pop(key, None)
                place[key] = tensor

    def _renew(self) -> None:
        """Follow buffers that the forward has replaced since: tables that grow with the inputs."""
        for number, (module, key, fake) in enumerate(self._slots):
            buffer = _place(module, key)[key]
            known = self.originals.get(id(fake))
            if known is None or buffer is known or not isinstance(buffer, Tensor):
                continue
            if buffer.shape != fake.shape:
                with self._mode:
                    renewed = torch.empty_strided(buffer.size(), buffer.stride(), dtype=fake.dtype, device=self._device)
                self._slots[number] = (module, key, renewed)
                self.buffers.append(renewed)
                fake = renewed
            self.originals[id(fake)] = buffer


@contextmanager
def quiet() -> Iterator[None]:
    """Inside, torch does not log what fakes cannot do: it raises too, and the trace has a way around."""
    log = logging.getLogger("torch._subclasses.fake_tensor")
    before, log.disabled = log.disabled, True
    try:
        yield
    finally:
        log.disabled = before


def _place(module: nn.Module, key: str) -> dict[str, Any]:
    """Where a tensor of a module is kept: what was stripped is a plain attribute."""
    places: tuple[dict[str, Any], ...] = (module._parameters, module._buffers, module.__dict__)
    return next(place for place in places if key in place)
