"""What each precision means in torch's dtypes."""

from types import MappingProxyType

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from hybridpp.config import Precision
from hybridpp.precision.formats import Formats

_HALF = {Precision.FP16: torch.float16, Precision.BF16: torch.bfloat16}
# torch's kernels for these compute means and variances in fp32, whatever the input, and on the CPU not all gradients.
_REDUCES_IN_FP32 = (nn.LayerNorm, nn.GroupNorm, nn.RMSNorm)


def dtype_of(precision: Precision | None) -> torch.dtype | None:
    """torch's dtype of that name; None for fp32, where nothing is rounded."""
    return None if precision is None else _HALF.get(precision)


def working_dtype(model: nn.Module, precision: Precision) -> torch.dtype | None:
    """The dtype of a model's working weights and activations; None leaves the model's own.

    In fp32, half-precision tensors are widened and float64 stays as it is.
    """
    if precision in _HALF:
        return _HALF[precision]
    tensors = (*model.parameters(), *model.buffers())
    return torch.float32 if any(tensor.dtype in _HALF.values() for tensor in tensors) else None


def casts(
    model: nn.Module, dtype: torch.dtype | None, formats: Formats = MappingProxyType({})
) -> dict[int, torch.dtype]:
    """The tensors of a model that change for a ``working_dtype``, by ``id``, with their new dtype.

    Half precision leaves as they are: complex tensors; and buffers that are no part of the state, which are derived
    constants (rotary frequencies) that models use in the precision they were made in. Batch normalisation is in fp32:
    its running statistics would stop moving, and its kernels take half-precision inputs beside fp32 weights.
    ``formats`` say otherwise of a module, and come first. What is in fp32 becomes it, whatever it was made in.
    """
    if dtype is None:
        return {}
    if dtype not in _HALF.values():
        tensors = (*model.parameters(), *model.buffers())
        return {id(tensor): dtype for tensor in tensors if tensor.dtype in _HALF.values()}
    changed: dict[int, torch.dtype] = {}
    for module in model.modules():
        target = formats.get(module, torch.float32 if isinstance(module, _BatchNorm) else dtype)
        derived = module._non_persistent_buffers_set
        buffers = [buffer for name, buffer in module.named_buffers(recurse=False) if name not in derived]
        for tensor in (*module.parameters(recurse=False), *buffers):
            if tensor.is_floating_point() and tensor.dtype is not target:
                changed[id(tensor)] = target
    return changed


def cast(model: nn.Module, dtype: torch.dtype | None, formats: Formats = MappingProxyType({})) -> None:
    """Do what :func:`casts` says, in place; parameters stay the same objects."""
    changed = casts(model, dtype, formats)
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            if id(parameter) in changed:
                parameter.data = parameter.data.to(changed[id(parameter)])
        for name, buffer in module.named_buffers(recurse=False):
            if id(buffer) in changed:
                module._buffers[name] = buffer.to(changed[id(buffer)])


def describe(model: nn.Module, formats: Formats = MappingProxyType({}), fp32_losses: bool = True) -> str:
    """A table of what computes in which format, by class: modules that hold weights themselves, or have ``formats``."""
    rows: dict[tuple[str, str, str], int] = {}
    for module in model.modules():
        held = [tensor for tensor in module.parameters(recurse=False) if tensor.is_floating_point()]
        if held:
            name = type(module).__name__
            weights = "/".join(sorted({str(tensor.dtype).removeprefix("torch.") for tensor in held}))
            half_norm = isinstance(module, _REDUCES_IN_FP32) and held[0].dtype in _HALF.values()
            key = (name, weights, f"{weights}, mean and variance float32" if half_norm else weights)
            rows[key] = rows.get(key, 0) + 1
        elif module in formats and not any(module.children()):
            key = (type(module).__name__, "", str(formats[module]).removeprefix("torch."))
            rows[key] = rows.get(key, 0) + 1
    head = ("module", "weights", "computes in")
    table = [(f"{number} {name}", weights, computes) for (name, weights, computes), number in sorted(rows.items())]
    table += [("loss functions in the model", "", "float32 or wider" if fp32_losses else "what they are given")]
    table += [("criterion, gradient sums, optimizer", "", "float32 or wider")]
    widths = [max(len(row[column]) for row in (head, *table)) for column in range(3)]
    lines = [" | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in (head, *table)]
    lines.insert(1, "-+-".join("-" * width for width in widths))
    return "\n".join(line.rstrip() for line in lines)
