"""Cache of units' results, so that a trace of a model with many equal blocks runs one of them."""

from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from hybridpp.nn import walk
from hybridpp.nn.torch_private import (
    FakeTensor,
    buffers_of,
    forward_hooks_of,
    forward_pre_hooks_of,
    parameters_of,
    pytree,
    storage_id,
)
from hybridpp.partition.containers import flatten
from hybridpp.partition.hooks import HookOnFakes

# Number of cached results; the least recently used are dropped. A trace of a large model needs dozens.
_MAX_RESULTS = 1024

_PLAIN = (bool, int, float, str)


@dataclass(frozen=True)
class _Shape:
    """Metadata of a tensor that a unit created."""

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


class _ById:
    """A key by identity; it keeps the object alive, so that its id stays unique."""

    def __init__(self, thing: Any):
        self._thing = thing

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _ById) and other._thing is self._thing

    def __hash__(self) -> int:
        return id(self._thing)


class _Key(NamedTuple):
    """What a call's result depends on."""

    kinds: Hashable
    training: tuple[bool, ...]
    hooks: tuple[_ById, ...]
    has_grad: bool
    tree: pytree.TreeSpec
    arguments: tuple[Hashable, ...]
    reached: Hashable


class TraceCache:
    """Results of units by what they depend on: class, sizes and settings of the module, and kinds of arguments.

    Attributes that only number a module (``layer_idx``) are ignored. Not cached are units that write to their
    arguments, return one of them, or return other things than tensors and plain values, nor units that return a plain
    value if their arguments hold objects, which may be its source.

    Args:
        model: of the units.
        names: of the units.
    """

    def __init__(self, model: nn.Module, names: tuple[str, ...]):
        self._modules = {name: tuple(walk.modules(walk.submodule(model, name))) for name in names}
        self._kinds: dict[str, Hashable] = {}
        self._results: dict[_Key, _Result] = {}

    @property
    def results(self) -> Mapping[_Key, _Result]:
        """What it holds now and a cache for an equal model may take: hooks are a model's own."""
        return {key: result for key, result in self._results.items() if not key.hooks}

    def take(self, results: Mapping[_Key, _Result]) -> None:
        """Take over the :attr:`results` of a cache for an equal model."""
        self._results.update(results)

    def key(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], reached: Hashable = ()) -> _Key:
        """The key of a unit's call; ``reached`` describes what else it may write to."""
        leaves, tree = flatten((args, kwargs))
        kinds: list[Hashable] = []
        for leaf in leaves:
            if isinstance(leaf, Tensor):
                kinds.append((leaf.shape, leaf.stride(), leaf.dtype, leaf.requires_grad, isinstance(leaf, FakeTensor)))
            else:
                # Only the class of other objects (a key-value cache): the run checks what is sent.
                kinds.append(cast(Hashable, (type(leaf), leaf) if _is_plain(leaf) else type(leaf)))
        modules = self._modules[name]
        if name not in self._kinds:
            self._kinds[name] = tuple(_kind(module) for module in modules)
        training = tuple(module.training for module in modules)
        hooks = [hook for module in modules for hook in _hooks(module)]
        return _Key(
            self._kinds[name], training, tuple(map(_ById, hooks)), torch.is_grad_enabled(), tree, tuple(kinds), reached
        )

    def numbers(self, name: str) -> tuple[Hashable, ...]:
        """The attributes of a unit that are ignored as they only number a module: with its position in the unit."""
        return tuple(
            (type(module), position, key, value)
            for position, module in enumerate(self._modules[name])
            for key, value in vars(module).items()
            if type(value) is int and _is_number(key)
        )

    def lookup(self, key: _Key, name: str, arguments: list[Tensor]) -> tuple[Any, int, tuple[str, ...]] | None:
        """New fakes of the result, its FLOPs and the names of the finest units inside; None if it is not cached."""
        result = self._results.pop(key, None)
        if result is not None:
            self._results[key] = result  # now the most recent
        fake = next((tensor for tensor in arguments if isinstance(tensor, FakeTensor)), None)
        if result is None or fake is None:
            return None
        leaves = [_make(leaf, fake) if isinstance(leaf, _Shape) else leaf for leaf in result.leaves]
        return pytree.tree_unflatten(leaves, result.tree), result.flops, tuple(name + rest for rest in result.inner)

    def store(
        self, key: _Key, name: str, output: Any, arguments: list[Any], flops: int, inner: tuple[str, ...]
    ) -> None:
        """Cache a result if it can be recreated; the tensors in ``arguments`` were not written to."""
        leaves, tree = flatten(output)
        memory = {storage_id(argument) for argument in arguments if isinstance(argument, Tensor)}
        objects = any(not isinstance(argument, Tensor) and not _is_plain(argument) for argument in arguments)
        for leaf in leaves:
            if leaf is None or (_is_plain(leaf) and not objects):
                continue
            if not isinstance(leaf, FakeTensor) or storage_id(leaf) in memory:
                return
        if all(unit == name or unit.startswith(f"{name}.") for unit in inner):
            shapes = tuple(_shape(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves)
            self._results[key] = _Result(shapes, tree, flops, tuple(unit.removeprefix(name) for unit in inner))
        while len(self._results) > _MAX_RESULTS:
            del self._results[next(iter(self._results))]


def _hooks(module: nn.Module) -> list[Any]:
    """The user's hooks on a module's forward that may affect its result."""
    held = (*forward_pre_hooks_of(module).values(), *forward_hooks_of(module).values())
    return [hook.hook for hook in held if isinstance(hook, HookOnFakes)]


def _is_plain(leaf: Any) -> bool:
    return leaf is None or isinstance(leaf, _PLAIN)


def _is_setting(value: Any) -> bool:
    """Whether an attribute is a plain value, or a tuple or list of such (the strides of a convolution)."""
    if isinstance(value, (tuple, list)):
        return all(map(_is_setting, value))
    return _is_plain(value)


def _is_number(attribute: str) -> bool:
    return attribute.endswith(("idx", "index"))


def _kind(module: nn.Module) -> Hashable:
    tensors = (*parameters_of(module).items(), *buffers_of(module).items())
    settings = tuple(
        (name, repr(value))
        for name, value in vars(module).items()
        if _is_setting(value) and name != "training" and not _is_number(name)
    )
    sizes = tuple((name, t.shape, t.dtype, t.requires_grad) for name, t in tensors if t is not None)
    return type(module), settings, sizes


def _shape(leaf: Tensor) -> _Shape:
    return _Shape(tuple(leaf.shape), leaf.stride(), leaf.dtype, leaf.device, leaf.requires_grad)


def _make(shape: _Shape, like: FakeTensor) -> Tensor:
    with like.fake_mode:
        made = torch.empty_strided(shape.size, shape.stride, dtype=shape.dtype, device=shape.device)
    # A clone is not a leaf, so container code may write to it.
    return made.requires_grad_().clone() if shape.requires_grad else made
