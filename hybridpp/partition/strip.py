"""Take from a model what other stages own."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn


def parameter_names(model: nn.Module) -> list[str]:
    """Every parameter's name; a tied one counts once, under its first name."""
    return [name for name, _ in model.named_parameters()]


def strip(
    model: nn.Module,
    owners: Mapping[str, tuple[int, ...]],
    stage: int,
    foreign_units: set[str],
    device: torch.device,
    dtypes: Mapping[int, torch.dtype],
) -> None:
    """Free the parameters that ``stage`` does not own, and hide them and the buffers of foreign units.

    A freed parameter stays readable as a plain attribute of the same shape, dtype and device without memory of its
    own (every element is the same zero), because a model's glue may ask for a weight's dtype or device.
    """
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    for module in model.modules():
        for key, parameter in list(module._parameters.items()):
            if parameter is not None and stage not in owners[names[id(parameter)]]:
                del module._parameters[key]
                module.__dict__[key] = _hollow(parameter, device, dtypes.get(id(parameter), parameter.dtype))
    for unit in foreign_units:
        for module in model.get_submodule(unit).modules():
            for key, buffer in list(module._buffers.items()):
                del module._buffers[key]
                module.__dict__[key] = None if buffer is None else buffer.to(device)


def _hollow(parameter: Tensor, device: torch.device, dtype: torch.dtype) -> Tensor:
    return torch.zeros((), dtype=dtype, device=device).expand(parameter.shape)
