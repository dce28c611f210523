"""Models on the meta device: allocate memory, and compute buffers that no file holds."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from hybridpp.errors import ConfigError
from hybridpp.nn import walk
from hybridpp.nn.pretrained_model import is_pretrained_model
from hybridpp.nn.snapshot import Replacements
from hybridpp.nn.torch_private import (
    buffers_of,
    forget_flat_weights,
    parameters_of,
    register_hooks_again,
    remake_flat_weights,
    transient_buffers_of,
    version_of,
)

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def allocate(model: nn.Module, others: Iterable[Tensor], device: torch.device) -> None:
    """Allocate uninitialised memory on ``device`` for a model's tensors on the meta device, and for others.

    They stay the same objects, so that tied weights and an optimizer's groups remain valid.
    """
    waiting = {
        id(tensor): tensor for tensor in (*walk.parameters(model), *walk.buffers(model), *others) if tensor.is_meta
    }
    recurrent = [
        module
        for module in walk.modules(model)
        if isinstance(module, nn.RNNBase) and any(id(parameter) in waiting for parameter in walk.parameters(module))
    ]
    with without_flat_weights(recurrent):
        for tensor in waiting.values():
            swap_value(tensor, torch.empty_like(tensor, device=device, requires_grad=False))


@contextmanager
def without_flat_weights(recurrent: Iterable[nn.RNNBase]) -> Iterator[None]:
    """Inside, values of these modules' weights may be swapped; torch refuses that while there are weak references."""
    for module in recurrent:
        forget_flat_weights(module)
    yield
    for module in recurrent:
        remake_flat_weights(module)


def swap_value(tensor: Tensor, value: Tensor) -> None:
    """Let a tensor refer to other values, also from or to the meta device; it stays the same object."""
    new = nn.Parameter(value, requires_grad=tensor.requires_grad) if isinstance(tensor, nn.Parameter) else value
    vars(new).update(vars(tensor))
    torch.utils.swap_tensors(tensor, new)  # type: ignore[no-untyped-call]  # torch
    register_hooks_again(tensor)


def derive_buffers(model: nn.Module) -> None:
    """Compute the non-persistent buffers on the meta device (rotary frequencies, position numbers).

    No file holds them. They are computed by the module's own initialisation: ``_init_weights`` of its Hugging Face
    model, which ``from_pretrained`` uses, too, or its ``reset_parameters``. Nothing else in the model changes.

    Raises:
        ConfigError: neither computes a buffer, or a tensor on the meta device is no buffer or parameter.
    """
    modules = dict(walk.named_modules(model))
    _check_attributes(modules)
    waiting = [
        (path, key, buffer)
        for path, module in modules.items()
        for key, buffer in buffers_of(module).items()
        if buffer is not None and buffer.is_meta and key in transient_buffers_of(module)
    ]
    if waiting:
        with _all_on_meta(model), torch.no_grad():
            for path, key, buffer in waiting:
                _derive(buffer, path, key, [modules[name] for name in _upwards(path)])


def _derive(buffer: Tensor, path: str, key: str, holders: list[nn.Module]) -> None:
    buffers = buffers_of(holders[0])
    if buffer.is_meta:  # else several modules hold it, and it was computed for the first one
        swap_value(buffer, torch.empty_like(buffer, device="cpu"))
    version = version_of(buffer)
    for depth, holder in enumerate(holders):
        _reset(holder, next(filter(is_pretrained_model, holders[depth:]), None))
        # Written to, or replaced by another one.
        if version_of(buffer) != version or (buffers.get(key) is not buffer and not _is_meta(buffers.get(key))):
            return
    raise ConfigError(
        f"buffer {f'{path}.{key}'.lstrip('.')} is on the meta device, is not in the state dict and is not computed by "
        f"a reset_parameters() of {type(holders[0]).__name__}. Write one, or build the model under accelerate's "
        "init_empty_weights(), which puts only parameters on the meta device."
    )


def _is_meta(tensor: Tensor | None) -> bool:
    return tensor is None or tensor.is_meta


def _reset(module: nn.Module, owner: "PreTrainedModel | None") -> None:
    if owner is not None:
        owner._init_weights(module)  # type: ignore[no-untyped-call]  # transformers
    elif callable(reset := getattr(module, "reset_parameters", None)):
        reset()


def _upwards(path: str) -> Iterator[str]:
    """A module's path, its parent's, and so on to the root's."""
    while path:
        yield path
        path = path.rpartition(".")[0]
    yield ""


def _check_attributes(modules: dict[str, nn.Module]) -> None:
    for path, module in modules.items():
        for key, value in vars(module).items():
            if not isinstance(value, Tensor) or not value.is_meta:
                continue
            if not any(value is buffer for buffer in buffers_of(module).values()):
                raise ConfigError(
                    f"{f'{path}.{key}'.lstrip('.')} is a tensor on the meta device that is no parameter and no buffer, "
                    "so nothing can fill it. Register it as a buffer, or build the model under accelerate's "
                    "init_empty_weights(), which puts only parameters on the meta device."
                )


@contextmanager
def _all_on_meta(model: nn.Module) -> Iterator[None]:
    """Inside, parameters and buffers with values are on the meta device, so that no initialisation overwrites them."""
    replaced = Replacements()
    try:
        for module in walk.modules(model):
            dicts: tuple[dict[str, Any], ...] = (parameters_of(module), buffers_of(module))
            entries = [(held, *item) for held in dicts for item in held.items()]
            for held, key, tensor in entries:
                if tensor is not None and not tensor.is_meta:
                    empty = torch.empty_like(tensor, device="meta", requires_grad=False)
                    replaced.put(held, key, nn.Parameter(empty, False) if isinstance(tensor, nn.Parameter) else empty)
        yield
    finally:
        replaced.restore()
