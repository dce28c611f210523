"""Weights that cannot be taken apart: expanded tensors, views of one another, and those of scripted modules."""

from collections.abc import Iterator
from itertools import combinations

import torch
from torch import Tensor, nn

from hybridpp.config import ZeroConfig
from hybridpp.errors import ConfigError
from hybridpp.nn import walk
from hybridpp.nn.torch_private import buffers_of, storage_id
from hybridpp_plugins.layout import Layout
from hybridpp_plugins.settings import PluginSettings


def separate_expanded(model: nn.Module, is_trained: bool) -> None:
    """Give expanded tensors that are saved memory for each of their elements, so that they can be read again.

    Raises:
        ConfigError: such a parameter is trained, of which an optimizer cannot update single elements.
    """
    for name, parameter in walk.named_parameters(model):
        if not _is_expanded(parameter):
            continue
        if parameter.requires_grad and is_trained:
            raise ConfigError(
                f"parameter {name!r} is trained, but expanded: got strides {parameter.stride()} for shape "
                f"{tuple(parameter.shape)}, so several of its elements are one in memory, and an optimizer cannot "
                "update them. Make the parameter small and expand it in the forward, or use .contiguous()."
            )
        parameter.data = parameter.data.contiguous()
    saved = {id(tensor) for tensor in model.state_dict(keep_vars=True).values() if isinstance(tensor, Tensor)}
    for buffer in walk.buffers(model):
        if id(buffer) in saved and _is_expanded(buffer):
            buffer.data = buffer.data.contiguous()


def _is_expanded(tensor: Tensor) -> bool:
    if tensor.layout is not torch.strided:
        return False
    return any(stride == 0 and size > 1 for stride, size in zip(tensor.stride(), tensor.shape, strict=True))


def refuse_scripted(model: nn.Module, layout: Layout, zero: ZeroConfig) -> None:
    """Refuse modules of ``torch.jit.script`` where their parameters would be sharded or given to stages.

    Raises:
        ConfigError: there is one, or the model itself is one, whose forward cannot be replaced.
    """
    apart = {"tp_size": layout.tp.size, "pp_size": layout.pp.size, "zero_stage": zero.among(layout.dp.size).zero_stage}
    because = next((name for name, value in apart.items() if value > (2 if name == "zero_stage" else 1)), None)
    if because is None:
        if isinstance(model, torch.jit.ScriptModule):
            raise ConfigError(
                "the model is a module of torch.jit.script or torch.jit.trace, whose forward cannot be replaced. Boost "
                "nn.Sequential(model), or the module as it was before."
            )
        return
    for name, module in walk.named_modules(model):
        if isinstance(module, torch.jit.ScriptModule):
            raise ConfigError(
                f"{f'module {name!r}' if name else 'the model'} is a module of torch.jit.script or torch.jit.trace, "
                f"which cannot be taken apart: {because} is {apart[because]}. Boost the module as it was before "
                "(functions of torch.jit.script work in its forward), or use tp_size=1, pp_size=1 and zero_stage=2 or "
                "less."
            )


def refuse_shared_memory(model: nn.Module, settings: PluginSettings, layout: Layout) -> None:
    """Refuse a trained parameter that shares memory with another tensor where a layout would take them apart.

    Raises:
        ConfigError: there is one.
    """
    apart = {
        "tp_size": layout.tp.size > 1,
        "pp_size": layout.pp.size > 1,
        "zero_stage": settings.zero.among(layout.dp.size).zero_stage > 0,
        "precision": settings.precision != "fp32",
        "offload_optimizer": settings.zero.offload_optimizer > 0,
    }
    because = next((name for name, is_set in apart.items() if is_set), None)
    if because is None:
        return
    by_memory: dict[int, list[tuple[str, Tensor]]] = {}
    for name, tensor in _tensors(model):
        if tensor.layout is torch.strided and not tensor.is_meta and tensor.numel():
            by_memory.setdefault(storage_id(tensor), []).append((name, tensor))
    for held in by_memory.values():
        for (name, one), (other_name, other) in combinations(held, 2):
            if (one.requires_grad or other.requires_grad) and _overlap(one, other):
                raise ConfigError(
                    f"{name!r} and {other_name!r} share memory without being one parameter: an update of one changes "
                    f"the other, which {because}= would not. Hold one parameter and make the other from it in the "
                    "forward (weight.t(), weight[:n]), or make a copy."
                )


def _tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from walk.named_parameters(model)
    seen: set[int] = set()
    for name, module in walk.named_modules(model):
        for key, buffer in buffers_of(module).items():
            if buffer is not None and id(buffer) not in seen:
                seen.add(id(buffer))
                yield f"{name}.{key}" if name else key, buffer


def _overlap(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors of one storage have an element in common."""
    if not (_first(one) < _end(other) and _first(other) < _end(one)):
        return False
    if one.element_size() != other.element_size():
        return True
    taken = torch.zeros(
        max(one.storage_offset() + _extent(one), other.storage_offset() + _extent(other)), dtype=torch.bool
    )
    taken.as_strided(one.shape, one.stride(), one.storage_offset()).fill_(True)
    return bool(taken.as_strided(other.shape, other.stride(), other.storage_offset()).any())


def _first(tensor: Tensor) -> int:
    return int(tensor.storage_offset() * tensor.element_size())


def _end(tensor: Tensor) -> int:
    return int((tensor.storage_offset() + _extent(tensor)) * tensor.element_size())


def _extent(tensor: Tensor) -> int:
    """Elements of memory from the first to the last."""
    return 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
