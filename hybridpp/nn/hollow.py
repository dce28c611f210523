"""Run a model's real code on the CPU without computing anything: large tensors have sizes, but no values.

A fake tensor (as in a trace) is another class, and code that asks for a tensor's class, or reads its values, goes other
ways on it. A hollow tensor is a plain tensor whose memory nobody has touched: the operating system gives such memory
when it is first written to, so it takes none. Operators on hollow tensors are not run. Their results have the sizes
that torch's meta kernels say, and are hollow, too. All other operators run: what is made of the inputs (masks, position
numbers) has its values, so code that branches on them goes the way that it will go. So have the indices of the largest
elements of a hollow tensor, by which tokens are routed to experts: each element of a row is chosen as often as any
other, so all experts get as many tokens.

A mask of all pairs of tokens takes long to compute and is only added to something hollow. So values of many megabytes
may be withheld until something small is made of them, which may be read.
"""

import math
import mmap
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeAlias

import torch
from torch import Tensor

from hybridpp.nn.torch_private import (
    READ_SCALAR,
    DisableTorchFunction,
    OpOverload,
    TorchDispatchMode,
    grouped_product_without_values,
    moves_nothing,
    place_of,
    schema_of,
    storage_id,
)

# Smaller ones have memory, and values of zero: a mapping takes a page, and they add up to little.
_LEAST_BYTES = 2**14
# Of Linux: the mapping does not count against what the system promises. Elsewhere it is not needed, or has no effect.
_NO_RESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000)
_aten = torch.ops.aten
_EMPTY = {
    _aten.empty.memory_format,
    _aten.empty_strided.default,
    _aten.empty_like.default,
    _aten.new_empty.default,
    _aten.new_empty_strided.default,
}
# Untouched memory is zero. Smaller ones may be the start of a mask, which is read; of one dimension there are none.
_ZEROS = {_aten.zeros.default, _aten.zeros_like.default, _aten.new_zeros.default}
_LEAST_ZEROS, _LEAST_FLAT = 2**24, 2**20
# Values of so many bytes are withheld; of what is made of them, these are taken to be read.
_LEAST_WITHHELD, _READ_BYTES = 2**22, 2**14
_FACTORIES = (_aten.empty.memory_format, _aten.empty_strided.default, _aten.zeros.default)
_SAME = object()
# What finds the largest elements along a dimension, with the position of this argument.
_CHOOSERS = {
    _aten.topk.default: 2,
    _aten.sort.default: 1,
    _aten.sort.stable: 1,
    _aten.max.dim: 1,
    _aten.argmax.default: 1,
}


# What an operator is given, the later ones first.
_VALUES, _WITHHELD, _HOLLOW = range(3)


class NeedsValuesError(BaseException):
    """What was withheld may be read. No error of the model, so it is none that code around an operator may catch."""


class Hollow(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's __init_subclass__
    """A context in which operators on hollow tensors are not run, and ``torch.empty`` makes hollow ones.

    Nothing but operators is changed: Python code, autograd and hooks run as ever. A value that is read of a hollow
    tensor is zero.

    Args:
        withholds: whether large results of operators on tensors with values are hollow, too. What is read of a view of
            such a result without an operator (``tolist``, ``numpy``) is zero.

    Raises:
        NeedsValuesError: something small is made of such results alone: run it again without ``withholds``.
    """

    def __init__(self, withholds: bool = False) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch
        self._withholds = withholds
        self._hollow: set[int] = set()
        # Those of them whose values are withheld.
        self._withheld: set[int] = set()
        self._known: dict[Any, Any] = {}
        self._least_zeros = _LEAST_ZEROS

    @contextmanager
    def without_masks(self) -> Iterator[None]:
        """Inside, small zeros are hollow, too: nothing is made there of which a value is read (gradients' sums)."""
        self._least_zeros = _LEAST_BYTES
        try:
            yield
        finally:
            self._least_zeros = _LEAST_ZEROS

    def is_hollow(self, tensor: Tensor) -> bool:
        """Whether a tensor has no values."""
        return storage_id(tensor) in self._hollow

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        # What casts functions, as modes do, has nothing to do with what is asked of tensors here.
        with DisableTorchFunction():
            return self._run(func, args, kwargs or {})

    def _run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if func in _EMPTY or func in _ZEROS:
            return self._empty(func, args, kwargs)
        if moves_nothing(func) or not isinstance(func, OpOverload):
            return func(*args, **kwargs)
        found = self._found((args, kwargs)) if self._hollow else _VALUES
        if found == _VALUES:
            may_be = self._withholds and any(one.device.type == "cpu" for one in _tensors((args, kwargs)))
            withheld = self._withheld_result(func, args, kwargs) if may_be else None
            return func(*args, **kwargs) if withheld is None else withheld
        written = _written(func)
        if written is not None:
            result = written(args, kwargs)
            if found == _WITHHELD and self._found(result) == _VALUES:
                raise NeedsValuesError
            return result
        if found == _WITHHELD:
            return self._withheld_result(func, args, kwargs, _READ_BYTES)
        if func is READ_SCALAR or func is _aten.equal.default:
            return func(*args, **kwargs)
        return self._result(func, args, kwargs)

    def _found(self, given: Any) -> int:
        """What the tensors have: one that is hollow, or else one whose values are withheld, or values."""
        if isinstance(given, Tensor):
            key = storage_id(given)
            return _VALUES if key not in self._hollow else _WITHHELD if key in self._withheld else _HOLLOW
        if isinstance(given, list | tuple):
            return max(map(self._found, given), default=_VALUES)
        return max(map(self._found, given.values()), default=_VALUES) if isinstance(given, dict) else _VALUES

    def _withheld_result(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], least: int = _LEAST_WITHHELD
    ) -> Tensor | None:
        """The large result of an operator, withheld; None: it is small, or not known beforehand.

        Raises:
            NeedsValuesError: the same of an operator on what is withheld.
        """
        try:
            spec = self._spec(func, args, kwargs) if _written(func) is None else None
        except (NotImplementedError, RuntimeError):
            spec = None
        if isinstance(spec, _Spec) and spec.num_bytes >= least:
            made = self._make(spec)
            self._withheld.add(storage_id(made))
            weakref.finalize(made.untyped_storage(), self._withheld.discard, storage_id(made))
            return made
        if least == _READ_BYTES:
            raise NeedsValuesError
        return None

    def _empty(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        device = kwargs.get("device") or (args[0].device if args and isinstance(args[0], Tensor) else "cpu")
        spec = self._spec(func, args, kwargs)
        least = self._least_zeros if len(spec.shape) > 1 else min(self._least_zeros, _LEAST_FLAT)
        is_large = func in _EMPTY or spec.num_bytes >= least
        if torch.device(device).type != "cpu" or not spec.dtype.is_floating_point or not is_large:
            return func(*args, **kwargs)
        return self._make(spec)

    def _result(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if func is _aten.index.Tensor:
            args = (args[0], self._positions(args[1]))
        try:
            spec = self._spec(func, args, kwargs)
        except (NotImplementedError, RuntimeError):
            # It has no meta kernel, or the size of its result depends on values: those are zero here.
            return self._marked(func(*args, **kwargs))
        result = self._built(spec)
        return _with_balanced_indices(func, args, kwargs, result) if func in _CHOOSERS else result

    def _positions(self, indices: Any) -> list[Any]:
        """Indices with the positions of what a mask with values selects, so that the size of the result is known."""
        found: list[Any] = []
        for one in indices:
            is_mask = isinstance(one, Tensor) and one.dtype is torch.bool and not self.is_hollow(one)
            found += one.nonzero().unbind(1) if is_mask else [one]
        return found

    def _spec(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What the operator returns, with a :class:`_Spec` for each tensor."""
        key = (func, _key(args), _key(kwargs))
        known = self._known.get(key, _SAME)
        if known is _SAME:
            on_meta = _on_meta(args), {**_on_meta(kwargs), **_on_meta_device(func, kwargs)}
            meta = grouped_product_without_values(func, *on_meta)
            meta = func(*on_meta[0], **on_meta[1]) if meta is None else meta
            known = self._known[key] = _specs(meta)
        return known

    def _built(self, spec: Any) -> Any:
        if isinstance(spec, _Spec):
            return self._make(spec)
        if isinstance(spec, list | tuple):
            return type(spec)(self._built(one) for one in spec)
        return spec

    def _make(self, spec: "_Spec") -> Tensor:
        if spec.num_bytes < _LEAST_BYTES:
            made = torch.zeros(spec.num_elements, dtype=spec.dtype)
        else:
            made = torch.frombuffer(_untouched(spec.num_bytes), dtype=spec.dtype)
        tensor = made.as_strided(spec.shape, spec.strides)
        self._marked(tensor)
        return tensor

    def _marked(self, result: Any) -> Any:
        for tensor in [result] if isinstance(result, Tensor) else result if isinstance(result, list | tuple) else ():
            if isinstance(tensor, Tensor) and storage_id(tensor) not in self._hollow:
                storage = tensor.untyped_storage()
                self._hollow.add(place_of(storage))
                weakref.finalize(storage, self._hollow.discard, place_of(storage))
        return result


def _tensors(given: Any) -> Iterator[Tensor]:
    if isinstance(given, Tensor):
        yield given
    elif isinstance(given, list | tuple | dict):
        for one in given.values() if isinstance(given, dict) else given:
            yield from _tensors(one)


class _Spec:
    """Sizes of a tensor."""

    __slots__ = ("dtype", "num_bytes", "num_elements", "shape", "strides")

    def __init__(self, tensor: Tensor):
        self.shape, self.strides, self.dtype = tuple(tensor.shape), tensor.stride(), tensor.dtype
        reach = sum((size - 1) * stride for size, stride in zip(self.shape, self.strides, strict=True))
        self.num_elements = reach + 1 if tensor.numel() else 0
        self.num_bytes = self.num_elements * tensor.dtype.itemsize


def _with_balanced_indices(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> Any:
    """What an operator returns that finds the largest elements, with indices among which all occur equally often."""
    dim_at = _CHOOSERS[func]
    dim = kwargs.get("dim", args[dim_at] if dim_at < len(args) else None if func is _aten.argmax.default else -1)
    is_pair = isinstance(result, tuple | list)
    indices = result[1] if is_pair else result
    if dim is None or not args[0].dim():
        return result
    size = args[0].shape[dim]
    shape = list(args[0].shape)
    count = shape[dim] = indices.shape[dim] if indices.dim() == args[0].dim() else 1
    num_rows = math.prod(shape) // max(count, 1)
    # Of a row that is sorted, any number of the first may be taken.
    step = count if count < size else 1
    chosen = (step * torch.arange(num_rows)[:, None] + torch.arange(count)) % max(size, 1)
    rows = [length for at, length in enumerate(shape) if at != dim % len(shape)]
    chosen = chosen.view(*rows, count).movedim(-1, dim).reshape(indices.shape)
    return type(result)((result[0], chosen)) if is_pair else chosen


def _untouched(num_bytes: int) -> mmap.mmap:
    if not hasattr(mmap, "MAP_PRIVATE"):
        return mmap.mmap(-1, num_bytes)
    return mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NO_RESERVE)


def _key(given: Any) -> Any:
    if isinstance(given, Tensor):
        return tuple(given.shape), given.stride(), given.dtype
    if isinstance(given, list | tuple):
        return tuple(map(_key, given))
    if isinstance(given, dict):
        return tuple((name, _key(one)) for name, one in given.items())
    # 1, 1.0 and True are equal, and give results of other dtypes.
    return given.__class__, given


def _on_meta(given: Any) -> Any:
    if isinstance(given, Tensor):
        return torch.empty_strided(given.shape, given.stride(), dtype=given.dtype, device="meta")
    if isinstance(given, list | tuple):
        return type(given)(map(_on_meta, given))
    if isinstance(given, dict):
        return {name: _on_meta(one) for name, one in given.items() if name != "device"}
    return given


def _on_meta_device(func: Any, kwargs: dict[str, Any]) -> dict[str, torch.device]:
    takes = "device" in kwargs or func in _FACTORIES
    return {"device": torch.device("meta")} if takes else {}


def _specs(meta: Any) -> Any:
    if isinstance(meta, Tensor):
        return _Spec(meta)
    if isinstance(meta, list | tuple):
        return type(meta)(map(_specs, meta))
    return meta


def _written(func: Any) -> "_Written":
    """What an operator returns that only writes to its arguments: takes these; None: it is another one."""
    if func not in _WRITTEN:
        _WRITTEN[func] = _find_written(func)
    return _WRITTEN[func]


_Written: TypeAlias = Callable[[tuple[Any, ...], dict[str, Any]], Any] | None
_WRITTEN: dict[Any, _Written] = {}


def _find_written(func: Any) -> _Written:
    schema = schema_of(func)
    names = [
        (index, one.name) for index, one in enumerate(schema.arguments) if one.alias_info and one.alias_info.is_write
    ]
    if not names or any(one.alias_info is None for one in schema.returns):
        return None

    def taken(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        found = [args[index] if index < len(args) else kwargs[name] for index, name in names]
        return None if not schema.returns else found[0] if len(schema.returns) == 1 else tuple(found)

    return taken
