"""Fake tensors that replace a model's parameters and buffers during a trace."""

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from hybridpp.nn import walk
from hybridpp.nn.snapshot import preserved_modules
from hybridpp.nn.torch_private import FAKE_TENSOR_LOG, FakeMode, FakeSpec, FakeTensorMode, buffers_of, parameters_of
from hybridpp.partition.absent import AbsentTensor


class Fakes:
    """A fake for every parameter and buffer of a model; nothing is allocated.

    The model itself is traced, not a copy: whatever was done to the instance (a patched forward, hooks) counts. It may
    be pruned later; there are fakes for all of its tensors still. They are made for the first trace: where another
    rank has made that, there are none.

    Args:
        model: on any device, also the meta device.
        device: device of the fakes.
        dtypes: of the fakes of tensors that will be cast, by the tensor's ``id``.

    Attributes:
        slots: where each fake is held: the module, its name there, the fake's number.
        specs: of the fakes, by number.
        originals: the buffers of the fakes, by number.
    """

    def __init__(self, model: nn.Module, device: torch.device, dtypes: Mapping[int, torch.dtype]):
        self._model, self._device = model, device
        parameters = walk.named_parameters(model)
        numbers: dict[int, int] = {id(parameter): number for number, (_, parameter) in enumerate(parameters)}
        buffers = {numbers.setdefault(id(buffer), len(numbers)): buffer for buffer in walk.buffers(model)}
        self._names = [name for name, _ in parameters]
        self.originals: dict[int, Tensor] = buffers
        tensors = dict(enumerate(parameter for _, parameter in parameters)) | buffers
        self.specs = {
            number: FakeSpec.of(tensor, dtypes.get(id(tensor), tensor.dtype), device)
            for number, tensor in tensors.items()
        }
        self._made: dict[int, Tensor] = {}
        self.slots: list[tuple[nn.Module, str, int]] = [
            (module, key, numbers[id(tensor)])
            for module in walk.modules(model)
            for key, tensor in (*parameters_of(module).items(), *buffers_of(module).items())
            if tensor is not None
        ]

    @cached_property
    def _mode(self) -> FakeTensorMode:
        return FakeMode(allow_non_fake_inputs=True)

    def _fake(self, number: int) -> Tensor:
        if number not in self._made:
            self._made[number] = self.specs[number].make(self._mode)
        return self._made[number]

    @property
    def parameters(self) -> list[tuple[str, Tensor]]:
        """The fake parameters with their names; a tied one has its first name."""
        return [(name, self._fake(number)) for number, name in enumerate(self._names)]

    @property
    def buffers(self) -> list[tuple[Tensor, Tensor]]:
        """The fake buffers with those that they are fakes of."""
        return [(self._fake(number), original) for number, original in self.originals.items()]

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Inside, the model holds the fakes; afterwards, what it held before."""
        with preserved_modules(self._model):
            for module, key, number in self.slots:
                fake = self._fake(number)
                # Pruned tensors are plain attributes, and must be parameters or buffers again. All are set anew, so
                # that a module's tensors have the order in which they were registered.
                del _owning_dict(module, key)[key]
                is_parameter = self.specs[number].is_parameter
                owner: dict[str, Any] = parameters_of(module) if is_parameter else buffers_of(module)
                owner[key] = fake
            yield

    def renew(self) -> None:
        """Update the fakes of buffers that the forward has replaced, such as tables that grow with the inputs."""
        is_new = False
        for index, (module, key, number) in enumerate(self.slots):
            original = self.originals.get(number)
            if original is None:
                continue
            buffer = _owning_dict(module, key)[key]
            if buffer is original or not isinstance(buffer, Tensor):
                continue
            if isinstance(buffer, AbsentTensor):
                if not original.is_meta:
                    continue
                buffer = torch.zeros((), dtype=original.dtype, device=self._device).expand(original.shape)
            spec = self.specs[number]
            if buffer.shape != spec.size:
                number = max(self.specs) + 1
                self.specs[number] = FakeSpec.of(buffer, spec.dtype, self._device)
                self.slots[index] = (module, key, number)
                is_new = True
            self.originals[number] = buffer
        if is_new:
            # Drop fakes that are no longer used.
            used = dict.fromkeys(number for _, _, number in self.slots)
            self.originals = {number: self.originals[number] for number in used if number in self.originals}
            self.specs = {number: self.specs[number] for number in used}
            self._made = {number: fake for number, fake in self._made.items() if number in used}


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
