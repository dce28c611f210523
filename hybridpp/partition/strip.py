"""Take from a model what other stages own."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TypeAlias

import torch
from torch import Tensor, nn

Slot: TypeAlias = tuple[nn.Module, str]
"""Where a module keeps a tensor."""


def parameter_names(model: nn.Module) -> list[str]:
    """Every parameter's name; a tied one counts once, under its first name."""
    return [name for name, _ in model.named_parameters()]


def strip(
    model: nn.Module,
    owners: Mapping[str, tuple[int, ...]],
    stages: Sequence[int],
    foreign_units: set[str],
    device: torch.device,
    dtypes: Mapping[int, torch.dtype],
) -> list[Slot]:
    """Free the parameters that ``stages`` do not own, and hide them and the buffers of foreign units.

    A freed parameter stays readable as a plain attribute of the same shape, dtype and device without memory of its
    own (every element is the same zero), because a model's glue may ask for a weight's dtype or device.

    Returns:
        One freed parameter of each unit that has none left, for :func:`shown`.
    """
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    freed: dict[nn.Module, str] = {}
    for module in model.modules():
        for key, parameter in list(module._parameters.items()):
            if parameter is not None and not set(stages) & set(owners[names[id(parameter)]]):
                del module._parameters[key]
                module.__dict__[key] = _hollow(parameter, device, dtypes.get(id(parameter), parameter.dtype))
                if module.__dict__[key].is_floating_point():
                    freed[module] = key
    for unit in foreign_units:
        for module in model.get_submodule(unit).modules():
            for key, buffer in list(module._buffers.items()):
                del module._buffers[key]
                if buffer is not None:
                    # One that waits for its numbers on the meta device never gets any here.
                    buffer = _hollow(buffer, device, buffer.dtype) if buffer.is_meta else buffer.to(device)
                module.__dict__[key] = buffer
    units = [model.get_submodule(unit) for unit in sorted(foreign_units)]
    bare = [unit for unit in units if next(unit.parameters(), None) is None]
    # Not any plain attribute: it may be one that a hook sets anew before each call (a weight that is normalised).
    return [slot for unit in bare for slot in [(part, freed[part]) for part in unit.modules() if part in freed][:1]]


@contextmanager
def shown(slots: list[Slot]) -> Iterator[None]:
    """Inside, freed parameters show up in ``parameters()`` again.

    A module without any could not tell its dtype or device, which Hugging Face models ask of their parts.
    """
    try:
        for module, key in slots:
            module._parameters[key] = module.__dict__[key]
        yield
    finally:
        for module, key in slots:
            module._parameters.pop(key, None)


def _hollow(parameter: Tensor, device: torch.device, dtype: torch.dtype) -> Tensor:
    return torch.zeros((), dtype=dtype, device=device).expand(parameter.shape)
