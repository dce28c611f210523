"""The torch dtypes of each precision, and casting a model to them."""

from collections.abc import Callable
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from hybridpp.config import Precision
from hybridpp.errors import ConfigError
from hybridpp.module_adapter import ModuleAdapter
from hybridpp.nn import walk
from hybridpp.nn.torch_private import APPLY, BatchNorm, apply_of_class, buffers_of, parameters_of, transient_buffers_of
from hybridpp.precision.declared_fp32 import DeclaredFp32
from hybridpp.precision.module_dtypes import ModuleDtypes
from hybridpp.text_table import text_table

_HALF = {Precision.FP16: torch.float16, Precision.BF16: torch.bfloat16}
# torch's kernels for these compute means and variances in fp32 for any input, but on the CPU not all gradients.
_REDUCES_IN_FP32 = (nn.LayerNorm, nn.GroupNorm, nn.RMSNorm)


def torch_dtype(precision: Precision | None) -> torch.dtype | None:
    """The torch dtype of a half precision; None for fp32, where nothing is rounded."""
    return None if precision is None else _HALF.get(precision)


def working_dtype(model: nn.Module, precision: Precision) -> torch.dtype | None:
    """The dtype of a model's working weights and activations; None leaves the model's own.

    In fp32, half-precision tensors are widened and float64 stays as it is.
    """
    if precision in _HALF:
        return _HALF[precision]
    tensors = (*walk.parameters(model), *walk.buffers(model))
    return torch.float32 if any(tensor.dtype in _HALF.values() for tensor in tensors) else None


def dtype_changes(
    model: nn.Module, dtype: torch.dtype | None, module_dtypes: ModuleDtypes = MappingProxyType({})
) -> dict[int, torch.dtype]:
    """The new dtype of every tensor of a model that changes under a ``working_dtype``, by ``id``.

    Half precision does not change complex tensors, nor non-persistent buffers, which are derived constants (rotary
    frequencies) that models use in their original precision. Batch normalisation is in fp32: in half precision its
    running statistics would stop changing, and its kernels accept half-precision inputs with fp32 weights.
    ``module_dtypes`` override both. Tensors of an fp32 module become fp32 whatever their dtype was, and so do those
    that the model declares (:class:`DeclaredFp32`). Where parameters were in that half precision before, buffers in
    fp32 are there on purpose, and stay.
    """
    if dtype is None:
        return {}
    if dtype not in _HALF.values():
        tensors = (*walk.parameters(model), *walk.buffers(model))
        return {id(tensor): dtype for tensor in tensors if tensor.dtype in _HALF.values()}
    changed: dict[int, torch.dtype] = {}
    declared = DeclaredFp32.of(model, dtype).tensors
    was_half = any(parameter.dtype is dtype for parameter in walk.parameters(model))
    for module in walk.modules(model):
        target = module_dtypes.get(module, torch.float32 if isinstance(module, BatchNorm) else dtype)
        derived = transient_buffers_of(module)
        buffers = [
            buffer
            for name, buffer in buffers_of(module).items()
            if buffer is not None and name not in derived and not (was_half and buffer.dtype is torch.float32)
        ]
        for tensor in (*parameters_of(module).values(), *buffers):
            if tensor is None:
                continue
            after = torch.float32 if id(tensor) in declared else target
            if tensor.is_floating_point() and tensor.dtype is not after:
                changed[id(tensor)] = after
    return changed


def cast_model(
    adapter: ModuleAdapter, dtype: torch.dtype | None, module_dtypes: ModuleDtypes = MappingProxyType({})
) -> None:
    """Apply :func:`dtype_changes` in place; parameters and buffers stay the same objects."""
    changed = dtype_changes(adapter.model, dtype, module_dtypes)
    for tensor in (*walk.parameters(adapter.model), *walk.buffers(adapter.model)) if changed else ():
        target = changed.get(id(tensor), tensor.dtype)
        if tensor.dtype is not target:
            adapter.noted(tensor, f"cast to {bare_name(target)}", partial(_cast, tensor, tensor.dtype))
            _cast(tensor, target)


def _cast(tensor: Tensor, dtype: torch.dtype) -> None:
    tensor.data = tensor.data.to(dtype)


def refuse_conversions(adapter: ModuleAdapter) -> None:
    """Let ``half()``, ``to(...)`` and the like of a boosted model raise where they would change a dtype or a device."""
    adapter.set_attribute(adapter.model, APPLY, _WithoutConversion(adapter.model), "refusal of conversions")


class _WithoutConversion:
    """What ``half()`` and the like of one model call; a copy of the model gets a copy of this, and is converted.

    An object of this library: models that differ in such objects only are equal (see :class:`Structure`).
    """

    def __init__(self, model: nn.Module):
        self._model, self._id = model, id(model)

    def __call__(self, function: Callable[[Tensor], Tensor], *args: Any, **kwargs: Any) -> nn.Module:
        model = self._model
        held = (*walk.parameters(model), *walk.buffers(model)) if id(model) == self._id else ()
        for dtype, device in dict.fromkeys((tensor.dtype, tensor.device) for tensor in held):
            after = function(torch.empty(0, dtype=dtype, device=device))
            if (after.dtype, after.device) != (dtype, device):
                raise ConfigError(
                    f"{type(model).__name__} is boosted: half(), float(), to(...) or the like would bring its "
                    f"{bare_name(dtype)} tensors on {device} to {bare_name(after.dtype)} on {after.device}, and "
                    "gradients, messages and what the optimizer updates would stay. Choose dtypes by precision= and "
                    "fp32_modules= of the plugin, and the device before booster.boost; or convert a copy: "
                    "copy.deepcopy(model).half()."
                )
        return apply_of_class(model, function, *args, **kwargs)


def bare_name(dtype: torch.dtype) -> str:
    """Without ``torch.``."""
    return str(dtype).removeprefix("torch.")


def describe_dtypes(
    model: nn.Module, module_dtypes: ModuleDtypes = MappingProxyType({}), fp32_losses: bool = True
) -> str:
    """A table of the compute dtypes by class, of modules that hold weights themselves or have a ``module_dtypes``."""
    rows: dict[tuple[str, str, str], int] = {}
    for module in walk.modules(model):
        held = [tensor for tensor in module.parameters(recurse=False) if tensor.is_floating_point()]
        if held:
            name = type(module).__name__
            weights = "/".join(sorted({bare_name(tensor.dtype) for tensor in held}))
            half_norm = isinstance(module, _REDUCES_IN_FP32) and held[0].dtype in _HALF.values()
            key = (name, weights, f"{weights}, mean and variance float32" if half_norm else weights)
            rows[key] = rows.get(key, 0) + 1
        elif module in module_dtypes and not any(module.children()):
            key = (type(module).__name__, "", bare_name(module_dtypes[module]))
            rows[key] = rows.get(key, 0) + 1
    head = ("module", "weights", "computes in")
    table = [(f"{number} {name}", weights, computes) for (name, weights, computes), number in sorted(rows.items())]
    table += [("loss functions in the model", "", "float32 or wider" if fp32_losses else "dtype of the arguments")]
    table += [("criterion, gradient sums, optimizer", "", "float32 or wider")]
    return text_table(head, table, left=range(3))
