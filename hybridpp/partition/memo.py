"""Remember what a unit returned, so that tracing a model of many equal blocks runs one of them."""

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils import _pytree as pytree

from hybridpp.partition.structure import flatten


@dataclass(frozen=True)
class _Shape:
    """A tensor that a unit made."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    requires_grad: bool


@dataclass(frozen=True)
class _Result:
    leaves: tuple[Any, ...]
    tree: pytree.TreeSpec
    flops: int
    inner: tuple[str, ...]


class Memo:
    """Results of units by what they depend on: class, sizes and settings of the module, kinds of its arguments.

    Numbers that only tell a module its place (``layer_idx``) do not count. A unit that writes to its arguments,
    returns one of them, or returns anything but tensors and plain values is not remembered; nor one that returns a
    number where its arguments hold objects, which may have given it.

    Args:
        model: of the units.
        names: of the units.
    """

    def __init__(self, model: nn.Module, names: tuple[str, ...]):
        self._modules = {name: tuple(model.get_submodule(name).modules()) for name in names}
        self._kinds: dict[str, Hashable] = {}
        self._results: dict[Hashable, _Result] = {}

    def key(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Hashable:
        """What the unit's result depends on."""
        leaves, tree = flatten((args, kwargs))
        kinds: list[Hashable] = []
        for leaf in leaves:
            if isinstance(leaf, Tensor):
                kinds.append((leaf.shape, leaf.stride(), leaf.dtype, leaf.requires_grad, isinstance(leaf, FakeTensor)))
            else:
                # Of other objects (a cache of keys and values) only the class: the run checks what travels.
                kinds.append(cast(Hashable, (type(leaf), leaf) if _is_plain(leaf) else type(leaf)))
        modules = self._modules[name]
        if name not in self._kinds:
            self._kinds[name] = tuple(_kind(module) for module in modules)
        training = tuple(module.training for module in modules)
        return self._kinds[name], training, torch.is_grad_enabled(), tree, tuple(kinds)

    def recall(self, key: Hashable, name: str, mode_of: list[Tensor]) -> tuple[Any, int, tuple[str, ...]] | None:
        """New fakes of the result, its FLOPs and the names of the finest units inside; None where it is unknown."""
        result = self._results.get(key)
        fake = next((tensor for tensor in mode_of if isinstance(tensor, FakeTensor)), None)
        if result is None or fake is None:
            return None
        leaves = [_make(leaf, fake) if isinstance(leaf, _Shape) else leaf for leaf in result.leaves]
        return pytree.tree_unflatten(leaves, result.tree), result.flops, tuple(name + rest for rest in result.inner)

    def remember(
        self, key: Hashable, name: str, output: Any, arguments: list[Any], flops: int, inner: tuple[str, ...]
    ) -> None:
        """Keep a result, if it is one that can be made again; the tensors in ``arguments`` were not written to."""
        leaves, tree = flatten(output)
        memory = {_memory(argument) for argument in arguments if isinstance(argument, Tensor)}
        objects = any(not isinstance(argument, Tensor) and not _is_plain(argument) for argument in arguments)
        for leaf in leaves:
            if leaf is None or (_is_plain(leaf) and not objects):
                continue
            if not isinstance(leaf, FakeTensor) or _memory(leaf) in memory:
                return
        if all(unit == name or unit.startswith(f"{name}.") for unit in inner):
            shapes = tuple(_shape(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves)
            self._results[key] = _Result(shapes, tree, flops, tuple(unit.removeprefix(name) for unit in inner))


def _is_plain(leaf: Any) -> bool:
    return leaf is None or isinstance(leaf, bool | int | float | str)


def _is_setting(value: Any) -> bool:
    """Whether an attribute is a plain value, or a tuple or list of such (the strides of a convolution)."""
    if isinstance(value, tuple | list):
        return all(map(_is_setting, value))
    return _is_plain(value)


def _kind(module: nn.Module) -> Hashable:
    tensors = (*module._parameters.items(), *module._buffers.items())
    settings = tuple(
        (name, repr(value))
        for name, value in vars(module).items()
        if _is_setting(value) and name != "training" and not name.endswith(("idx", "index"))
    )
    sizes = tuple((name, t.shape, t.dtype, t.requires_grad) for name, t in tensors if t is not None)
    return type(module), settings, sizes


def _memory(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _shape(leaf: Tensor) -> _Shape:
    return _Shape(tuple(leaf.shape), leaf.stride(), leaf.dtype, leaf.device, leaf.requires_grad)


def _make(shape: _Shape, like: FakeTensor) -> Tensor:
    with like.fake_mode:
        made = torch.empty_strided(shape.size, shape.stride, dtype=shape.dtype, device=shape.device)
    # A clone is no leaf, so glue may write to it.
    return made.requires_grad_().clone() if shape.requires_grad else made
