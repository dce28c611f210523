"""What a loss is a mean over: counted in every micro-batch, and the weights of micro-batches and replicas that follow.

With these weights, the losses and gradients of parts of a batch add up to those of the whole batch.
"""

import math
import operator
import weakref
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hybridpp.errors import ConfigError, DataError
from hybridpp.nn.torch_private import version_or_none

Path = tuple[Any, ...]
Product = tuple[tuple[int, int], ...]
"""Numbers that a sum is divided by (power -1) or multiplied with: indices of counts, with powers."""
TermKey = frozenset[tuple[int, int]]
"""The same numbers, by signatures of counts."""

MAX_COUNTS = 32
"""Different numbers that the terms of one loss may be divided by: they fit in the message that begins a step."""

_COMPARISONS = frozenset(["lt", "le", "gt", "ge"])
# Numbers of items with which lower limits are looked for; half precision can hold them.
_TRIED = (0.0, 1.0, 2.0, 3.0, 5.0, 7.0, 20.0, 300.0, 4096.0, 16384.0)


class Count:
    """A value that depends on nothing but the inputs of a micro-batch: a function, applied to other such values.

    Args:
        function: of ``args`` and ``kwargs``.
        args: values, and instances of this class in their place, in any lists, tuples, dicts and slices.
        kwargs: the same.

    Attributes:
        is_of_sizes: whether it depends only on the shapes of inputs.
        limits: numbers above 0 that the script has compared it with, as ``max(count, 1)`` does; and whether it was
            at most that number.
        is_read: whether the script has read it as a plain number, by which it may branch unseen.
    """

    def __init__(
        self, function: Callable[..., Any], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ):
        self.function, self.args, self.kwargs = function, args, dict(kwargs or {})
        self.is_of_sizes: bool
        inner: list[Count] = []
        for value in (*args, *self.kwargs.values()):
            _each(value, inner)
        self.is_of_sizes = function in _OF_SIZES or (bool(inner) and all(one.is_of_sizes for one in inner))
        self.limits: dict[float, bool] = {}
        self.is_read: bool = any(one.is_read for one in inner)

    def compared(self, name: str, other: Any, outcome: bool) -> None:
        """Note the outcome of a comparison with a plain number: ``name`` is that of the operator."""
        if isinstance(other, int | float) and not isinstance(other, bool) and other > 0 and name in _COMPARISONS:
            self.limits[float(other)] = outcome is (name in ("lt", "le"))

    def of(self, inputs: Any, num_samples: int) -> Any:
        """Its value for the inputs of a micro-batch with as many samples, on the device of the inputs."""
        return _Values(inputs, num_samples).of(self)

    @cached_property
    def limit(self) -> "tuple[Count, float] | None":
        """A count without a lower limit, and that limit; None: it has none."""
        pending, seen = self._inner(), {id(self)}
        for inner in pending:
            if id(inner) in seen:
                continue
            seen.add(id(inner))
            pending.extend(inner._inner())
            if (found := self._limit_on(inner)) is not None:
                factor, floor = found
                return (inner if factor == 1 else Count(operator.mul, (inner, factor))), floor
        return None

    @cached_property
    def is_of_row(self) -> bool:
        """Whether it depends on some rows alone, such as those of one sample."""
        name, rest = _name_of(self), self.args[1:]
        first = rest[0] if name == "getitem" else None
        first = first[0] if isinstance(first, tuple) and first else first
        is_rows = name == "unbind" and (rest or (self.kwargs.get("dim", 0),))[0] == 0
        is_row = self.function is row_of or is_rows or type(first) is int
        if is_row and isinstance(self.args[0], Count) and "unique" in _name_of(self.args[0]):
            is_row = False  # one of the classes that are there
        own = self.function is of_row or is_row
        return own or any(one.is_of_row for one in self._inner())

    @cached_property
    def signature(self) -> int:
        """Equal for counts that are made in the same way of the same entries, in any micro-batch and on any replica.

        Lower limits and conversions are left out, and so are sizes, the limits of slices and tensors of several
        elements that are no inputs: a script may have made these for a micro-batch.
        """
        first = self.args[0] if self.args else None
        if isinstance(first, Count) and (self.function is at_least or _name_of(self) in _SAME):
            return first.signature
        label = _label(self.function)
        if self.function is single:
            return zlib.crc32(label.encode())  # of any sample
        kwargs = tuple((key, _signed(value, label)) for key, value in sorted(self.kwargs.items()))
        return zlib.crc32(repr((label, _signed(self.args, label), kwargs)).encode())

    @cached_property
    def family(self) -> int:
        """Equal for counts whose signatures differ by what is compared with, or by an index: by a class, or a task."""
        first = self.args[0] if self.args else None
        if isinstance(first, Count) and (self.function is at_least or _name_of(self) in _SAME):
            return first.family
        label = _label(self.function)
        kwargs = tuple((key, _of_family(value, label)) for key, value in sorted(self.kwargs.items()))
        return zlib.crc32(repr((label, _of_family(self.args, label), kwargs)).encode())

    def _inner(self) -> "list[Count]":
        found: list[Count] = []
        _each((self.args, self.kwargs), found)
        return found

    def _limit_on(self, inner: "Count") -> tuple[float, float] | None:
        """A factor, and the lower limit of the number that it makes of another one; None: it is no such function.

        Tried with several numbers at once, so it is none either where it adds up what has more than one element.
        """
        tried = torch.tensor(_TRIED, dtype=torch.float64)
        try:
            made = torch.as_tensor(_Values(None, None, {id(inner): tried}).of(self)).double()
        except Exception:  # any operation of the script's, on what it was not made for
            return None
        if made.shape != tried.shape:
            return None
        floor, factor = float(made[0]), float(made[-1] / tried[-1])
        if not 0 < floor < 0.5 * float(made[-1]):
            return None
        factor = 1.0 if math.isclose(factor, 1.0, rel_tol=1e-3) else factor
        expected = (factor * tried).clamp(min=floor)
        return (factor, floor) if bool(((made - expected).abs() <= 1e-2 * expected).all()) else None


class Constant:
    """A tensor that is no input, such as the weights of classes. It may change its values.

    Args:
        tensor: the values.
        num_samples: of the micro-batch for which the script may have made it; None: not known.
    """

    def __init__(self, tensor: Tensor, num_samples: int | None = None):
        self._tensor, self._num_samples, self._given = tensor.detach(), num_samples, tensor
        self._copies: dict[torch.device, Tensor] = {}

    def of_samples(self, num_samples: int | None, device: torch.device) -> Tensor:
        """What the script would have made for as many samples, there, if its rows are equal, as those of ``ones``.

        Or if they count up, as those of ``arange``.
        """
        made, before = self.on(device), self._num_samples
        if not before or not num_samples:
            return made
        is_index = made.dim() == 1 and not made.is_floating_point() and len(made) > 1 and len(made) % before == 0
        if is_index and torch.equal(made, torch.arange(len(made), dtype=made.dtype, device=device)):
            return torch.arange(len(made) // before * num_samples, dtype=made.dtype, device=device)
        for dim, num_rows in enumerate(made.shape):
            row = made.narrow(dim, 0, min(num_rows, 1))
            if num_rows and num_rows % before == 0 and bool((made == row).all()):
                return torch.cat([row] * (num_rows // before * num_samples), dim)
        return made

    def signed(self, is_set: bool) -> tuple[Any, ...]:
        """What tells it apart: the value of a single number, and those of a set of some."""
        made = self._tensor
        is_told = made.numel() == 1 or (is_set and made.numel() <= _MAX_SIGNED)
        return str(made.dtype), made.dim(), _read_once(self._given) if is_told else ()

    def on(self, device: torch.device) -> Tensor:
        """The tensor, there."""
        if self._tensor.device == device:
            return self._tensor
        if device not in self._copies:
            self._copies[device] = self._tensor.to(device)
        return self._copies[device]


# Values of small tensors, with these and their versions: the host waits for a device once for each.
_VALUES: dict[int, tuple[weakref.ref[Tensor], int | None, tuple[Any, ...]]] = {}


def _read_once(tensor: Tensor) -> tuple[Any, ...]:
    version = version_or_none(tensor)
    reference, before, values = _VALUES.get(id(tensor), (None, None, ()))
    if reference is None or reference() is not tensor or before != version or version is None:
        values = tuple(tensor.detach().flatten().tolist())
        _VALUES[id(tensor)] = weakref.ref(tensor, partial(_forget, id(tensor))), version, values
    return values


def _forget(key: int, _: Any) -> None:
    _VALUES.pop(key, None)


class _Device:
    """Stands for the device of the inputs."""


SAME_DEVICE = _Device()


def entry(path: Path) -> Count:
    """The tensor at a path of the inputs."""
    return Count(_entry, (path,))


def entry_path(count: Count) -> Path | None:
    """Where the inputs hold what a count is, converted or not; None: it is something else."""
    while count.function is not _entry:
        if _name_of(count) not in _SAME or not isinstance(count.args[0], Count):
            return None
        count = count.args[0]
    path: Path = count.args[0]
    return path


def _entry(path: Path) -> None:
    raise AssertionError("read from the inputs")


def unit_of(count: Count) -> str:
    """What a number counts: samples, elements of some entries of the inputs, or what their values say."""
    if not count.is_of_sizes:
        return "values"
    sources: set[str] = set()
    pending = [count]
    for one in pending:
        if one.function in (_entry, _sizes):
            sources.add(str(one.args[0]))
        pending += one._inner()
    return ", ".join(sorted(sources)) or "samples"


def num_rows() -> Count:
    """The number of samples."""
    return Count(_rows)


def _rows() -> None:
    raise AssertionError("known with the inputs")


def sizes_of(prefix: Path, suffix: Path, kind: str) -> Count:
    """The sizes of the tensors at a path of each entry of a list, such as the boxes of each image, added up.

    Args:
        prefix: where the inputs hold the list.
        suffix: where each of its entries holds a tensor.
        kind: ``"size"``: of dimension 0; ``"numel"``: all elements.
    """
    return Count(_sizes, (prefix, suffix, kind))


def _sizes(prefix: Path, suffix: Path, kind: str) -> None:
    raise AssertionError("read from the inputs")


def _at(inputs: Any, path: Path) -> Any:
    """What the inputs hold at a path.

    Raises:
        NotCountedError: a list is too short.
    """
    found = inputs
    try:
        for key in path:
            found = found[key]
    except IndexError as error:
        where = "".join(f"[{key!r}]" for key in path)
        raise NotCountedError(f"it reads {where} of the batch, which not every part of it has") from error
    return found


def size(tensor: Any, dim: int) -> Any:
    """The size of a dimension."""
    return tensor.shape[dim]


def numel(tensor: Any) -> Any:
    """The number of elements."""
    return tensor.numel()


def single(index: int) -> int:
    """1, of what belongs to the sample with an index."""
    return 1


def row_of(tensor: Any, index: int) -> Any:
    """One row."""
    return tensor[index]


def of_row(value: Any) -> Any:
    """A number of one row alone, by which what is made of that row is divided."""
    return value


def at_least(value: Any, limit: float) -> Any:
    """The value, or a lower limit."""
    return value.clamp(min=limit) if isinstance(value, Tensor) else max(value, limit)


def number(tensor: Any) -> Any:
    """A tensor's one element, still as a tensor."""
    return tensor


def written(function: Callable[..., Any], tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """What a function that writes to its first argument makes of it."""
    copy = tensor.clone()
    function(copy, *args, **kwargs)
    return copy


def counted_targets(target: Tensor, ignore_index: int, weight: Tensor | None) -> Tensor:
    """The weight of the targets that classification losses do not ignore."""
    counts = target != ignore_index
    if weight is None:
        return counts.sum()
    return (weight[target.where(counts, 0)] * counts).sum()


_SAME = frozenset(["to", "float", "double", "int", "long", "number", "item", "type", "clone", "detach", "cpu", "cuda"])


def _name_of(count: Count) -> str:
    return getattr(count.function, "__name__", "")


_OF_SIZES = frozenset([size, numel, _rows, _sizes])
# What they get as plain numbers may be sizes of a micro-batch.
_RESIZING = frozenset(["view", "reshape", "expand", "repeat", "unflatten", "split", "chunk", "narrow", "room", "pad"])
# What they compare with, and the indices that they get, tell groups of samples apart.
_COMPARING = frozenset(["eq", "ne", "lt", "le", "gt", "ge", "isin"])
_INDEXING = frozenset(["getitem", "select", "row_of", "entry_of"])
# Their plain numbers are no sizes, dimensions or indices.
_COMPUTING_NAMES = """
    pow rpow mul rmul multiply div truediv rtruediv divide true_divide add radd sub rsub exp2 clamp lerp
"""
_COMPUTING = frozenset(_COMPUTING_NAMES.split())
# Constants of more elements are not told apart.
_MAX_SIGNED = 64


def _label(function: Any) -> str:
    """A function's name, the same for a method and a function."""
    name = getattr(function, "__name__", type(function).__name__)
    if name == "__get__":
        name = getattr(function.__self__, "__name__", name)
    return str(name).strip("_")


def _signed(value: Any, label: str) -> Any:
    """What an argument of a function with a name adds to a signature."""
    if isinstance(value, Count):
        return value.signature
    if isinstance(value, Constant):
        return value.signed(is_set=label == "isin")
    if isinstance(value, slice):
        return "slice", *(
            None if one is None else _signed(one, label) if isinstance(one, Count) else "number"
            for one in (value.start, value.stop, value.step)
        )
    if isinstance(value, Mapping):
        return tuple((key, _signed(one, label)) for key, one in value.items())
    if isinstance(value, list | tuple):
        return tuple(_signed(one, label) for one in value)
    if type(value) is int and label in _RESIZING:
        return "number"
    return _label(value) if callable(value) or isinstance(value, _Device) else repr(value)


def _of_family(value: Any, label: str) -> Any:
    """The same for a family."""
    if isinstance(value, Count):
        return value.family
    if type(value) in (list, tuple):
        return tuple(_of_family(one, label) for one in value)
    is_index = type(value) is int and label in _INDEXING
    return "any" if is_index or label in _COMPARING else _signed(value, label)


def _each(value: Any, found: list[Count]) -> None:
    if isinstance(value, Count):
        found.append(value)
    elif isinstance(value, slice):
        _each((value.start, value.stop, value.step), found)
    elif isinstance(value, Mapping):
        _each(tuple(value.values()), found)
    elif isinstance(value, list | tuple):
        for one in value:
            _each(one, found)


class _Values:
    """The values of counts for one micro-batch; each is made once."""

    def __init__(self, inputs: Any, num_samples: int | None, made: Mapping[int, Any] | None = None):
        self._inputs, self._num_samples = inputs, num_samples
        self._made: dict[int, Any] = dict(made or {})
        self._device, self._is_resized = torch.device("cpu"), False

    def of(self, count: Count) -> Any:
        key = id(count)
        if key not in self._made:
            self._made[key] = self._make(count)
        return self._made[key]

    def _make(self, count: Count) -> Any:
        if count.function is _rows and self._num_samples is not None:
            return self._num_samples
        if count.function is _entry:
            found = _at(self._inputs, count.args[0])
            self._device = found.device
            return found.detach()
        if count.function is _sizes:
            prefix, suffix, kind = count.args
            tensors = [_at(one, suffix) for one in _at(self._inputs, prefix)]
            return sum(one.numel() if kind == "numel" else one.shape[0] for one in tensors)
        # Counts first: they tell the device that the rest is on.
        inner: list[Count] = []
        _each((count.args, count.kwargs), inner)
        for one in inner:
            self.of(one)
        try:
            return count.function(*self._filled(count.args), **self._filled(count.kwargs))
        except (RuntimeError, IndexError, ValueError):
            if self._is_resized:
                raise
            # A constant may have been made for another number of samples.
            self._is_resized = True
            try:
                return count.function(*self._filled(count.args), **self._filled(count.kwargs))
            finally:
                self._is_resized = False

    def _filled(self, value: Any) -> Any:
        if isinstance(value, Count):
            return self.of(value)
        if isinstance(value, Constant):
            if self._is_resized:
                return value.of_samples(self._num_samples, self._device)
            return value.on(self._device)
        if isinstance(value, _Device):
            return self._device
        if isinstance(value, slice):
            return slice(*self._filled((value.start, value.stop, value.step)))
        if isinstance(value, dict):
            return {name: self._filled(one) for name, one in value.items()}
        if type(value) in (list, tuple):
            return type(value)(self._filled(one) for one in value)
        return value


class TracedInt(int):
    """An integer that a function of the inputs gave, such as a size; arithmetic on it keeps where it came from."""

    count: Count

    @classmethod
    def of(cls, value: int, count: Count) -> "TracedInt":
        """``value``, which ``count`` gave."""
        made = cls(value)
        made.count = count
        return made


class TracedFloat(float):
    """The same for a float."""

    count: Count

    @classmethod
    def of(cls, value: float, count: Count) -> "TracedFloat":
        """``value``, which ``count`` gave."""
        made = cls(value)
        made.count = count
        return made


def traced(value: Any, count: Count) -> Any:
    """A number with where it came from; any other value as it is."""
    if type(value) in (int, TracedInt):
        return TracedInt.of(value, count)
    if type(value) in (float, TracedFloat):
        return TracedFloat.of(value, count)
    return value


def count_of(value: Any) -> Any:
    """The count of a traced number; any other value as it is."""
    return value.count if isinstance(value, TracedInt | TracedFloat) else value


def _arithmetic(kind: type, base: type, name: str) -> None:
    plain = getattr(base, name)
    bare = name.strip("_")
    reflected = bare.startswith("r") and bare not in ("round", "rshift")
    function = getattr(operator, bare[1:] if reflected else bare)

    def method(self: Any, *others: Any) -> Any:
        result = plain(self, *others)
        if result is NotImplemented and isinstance(others[0], float):
            result = getattr(float, name)(float(self), *others)
        if result is NotImplemented:
            return result
        terms: Sequence[Any] = (self, *others)
        return traced(result, Count(function, tuple(map(count_of, terms[::-1] if reflected else terms))))

    setattr(kind, name, method)


def _comparison(kind: type, base: type, name: str) -> None:
    plain = getattr(base, f"__{name}__")

    def method(self: Any, other: Any) -> Any:
        result = plain(self, other)
        if result is NotImplemented and isinstance(other, float):
            result = getattr(float, f"__{name}__")(float(self), other)
        if isinstance(result, bool) and type(other) in (int, float):
            self.count.compared(name, other, result)
        return result

    setattr(kind, f"__{name}__", method)


for _kind, _base in ((TracedInt, int), (TracedFloat, float)):
    for _name in _COMPARISONS:
        _comparison(_kind, _base, _name)
    for _name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "neg"):
        _arithmetic(_kind, _base, f"__{_name}__")
        if _name != "neg":
            _arithmetic(_kind, _base, f"__r{_name}__")


class NotCountedError(Exception):
    """A number that a loss is divided by cannot be told from a batch; the text says why."""


class TooManyCountsError(NotCountedError):
    """The terms of a loss are divided by more than :data:`MAX_COUNTS` different numbers."""


def not_counted(error: Exception) -> NotCountedError:
    """The error of a count that could not be made."""
    return error if isinstance(error, NotCountedError) else NotCountedError(f"{type(error).__name__}: {error}")


class Measured(NamedTuple):
    """The counts of a micro-batch.

    Attributes:
        used: what the loss of the micro-batch is divided by.
        added: what it adds to the count of the whole batch: what ``used`` would be without a lower limit.
    """

    used: tuple[float, ...]
    added: tuple[float, ...]


@dataclass(frozen=True, kw_only=True)
class LossForm:
    """A loss as a sum of terms, each of which is a sum over items, divided by numbers of items.

    Attributes:
        counts: the numbers, of a micro-batch.
        products: what the terms are divided by; each different one once.
        of_terms: the product of each term, in the order of the terms; None: the term does not depend on the batch.
        keys: of each term, what tells it apart in other micro-batches, where a script may leave out some; None: the
            term does not depend on the batch.
        fixed: signatures of numbers that are the same for any samples, which are in no product.
        may_branch: whether the script has read values of the inputs, by which it may leave out terms.
        branches: whether it was seen to branch by them.
        of_parts: whether the elements of each term were divided before they were added up, which no graph shows.
        in_model: whether the model computed the loss.
        divides_by_total: whether it is divided by the ``num_items_in_batch`` that the script put in the batch;
            ``counts`` then has what the sum counts, if that is known.
        is_by_row: whether a term is divided by a number of some rows alone, such as those of one sample.
        choice: which meaning plain numbers have that may have several; see
            :class:`~hybridpp.pipeline.loss_trace.LossTrace`.
        kinds: by which functions its terms are reduced, as graphs have shown; see
            :class:`~hybridpp.pipeline.loss_graph.GraphTerm`.
        numbers_of_terms: how many, as graphs have shown.
        functions: of which the criterion made it of the model's outputs when it was looked at.
        others: of which it has made it since then.
    """

    counts: tuple[Count, ...]
    products: tuple[Product, ...]
    of_terms: tuple[Product | None, ...] = ()
    keys: tuple[TermKey | None, ...] = ()
    fixed: frozenset[int] = frozenset()
    may_branch: bool = False
    branches: bool = False
    of_parts: tuple[bool, ...] = ()
    in_model: bool = False
    divides_by_total: bool = False
    is_by_row: bool = False
    choice: int = 0
    kinds: set[str] = field(default_factory=set, compare=False)
    numbers_of_terms: set[int] = field(default_factory=set, compare=False)
    functions: set[str] = field(default_factory=set, compare=False)
    others: set[str] = field(default_factory=set, compare=False)

    def signed(self, product: Product) -> "TermKey":
        """What a product is made of, equal for all forms of one loss."""
        return frozenset((self.counts[index].signature, power) for index, power in product)

    def has_items(self, product: Product, own: Measured) -> bool:
        """Whether a term of a micro-batch is divided by numbers above 0."""
        return all(own.used[index] for index, _ in product)

    @property
    def has_constant(self) -> bool:
        """Whether a term does not depend on the batch."""
        return None in self.of_terms

    @cached_property
    def kind(self) -> float:
        """A number that is equal for losses of one form, on all replicas; negative: batches need no items; not 0."""
        units = [unit_of(one) for one in self.counts]
        terms = {None if one is None else tuple(sorted(self.signed(one))) for one in self.of_terms}
        counts = [one.signature for one in self.counts]
        number = 1.0 + zlib.crc32(repr((sorted(map(repr, terms)), counts, self.divides_by_total, units)).encode())
        return -number if self.counts and min(self.floors) > 0 else number

    @property
    def is_sum(self) -> bool:
        """Whether it is a sum over samples."""
        return self.products == ((),)

    @cached_property
    def holds_numbers(self) -> bool:
        """Whether what it counts depends on plain numbers of the script's, which it may change: powers, thresholds."""
        pending = list(self.counts)
        for one in pending:  # which grows
            kinds = (int, float) if _label(one.function) in _COMPUTING else (float,)
            if any(type(value) in kinds for value in (*one.args, *one.kwargs.values())):
                return True
            pending += one._inner()
        return False

    @property
    def is_of_samples(self) -> bool:
        """Whether it is taken for a mean over samples, though its terms do not show."""
        return not self.of_terms and self.products == (((0, -1),),) and self.is_of_rows(self.products[0])

    def is_of_rows(self, product: Product) -> bool:
        """Whether a product is made of numbers of samples alone."""
        return all(self.counts[index].function is _rows for index, _ in product)

    @classmethod
    def of_rows(cls) -> "LossForm":
        """A mean over samples."""
        return cls(counts=(num_rows(),), products=(((0, -1),),))

    @cached_property
    def floors(self) -> tuple[float, ...]:
        """Lower limits of the counts of a batch; minus infinity: none."""
        return tuple(-math.inf if one.limit is None else one.limit[1] for one in self.counts)

    def limited(self, total: Sequence[float]) -> list[float]:
        """What the terms of the whole batch are divided by, whose counts are ``total``."""
        return [max(one, floor) for one, floor in zip(total, self.floors, strict=True)]

    def has_open(self, own: Measured) -> bool:
        """Whether a number of a micro-batch is 0 for which the script may have put another, by a branch unseen."""
        return any(
            not used and one.is_read and one.limit is None for one, used in zip(self.counts, own.used, strict=True)
        )

    def may_lack(self, own: Measured) -> bool:
        """Whether no term of a micro-batch has items, so that the script may have made one that is not known."""
        lacks_all = not any(self.has_items(one, own) for one in self.products)
        return self.may_branch and bool(self.counts) and lacks_all

    @property
    def needs_terms(self) -> bool:
        """Whether its terms have different weights, so that they are needed one by one."""
        return len(self.products) > 1 or (self.is_sum and self.has_constant and not self.divides_by_total)

    @property
    def must_be_empty(self) -> bool:
        """Whether the loss of a micro-batch without items is nothing, unless it has a term that is not counted."""
        return bool(self.of_terms) and not (self.needs_terms or self.has_constant or self.divides_by_total)

    @property
    def shows_divisors(self) -> bool:
        """Whether another loss of this form must be divided by numbers of the batch that are known."""
        return bool(self.of_terms) and not self.divides_by_total and not self.is_by_row

    def is_watched(self, measured: Iterable[Measured | None]) -> bool:
        """Whether it must be seen how the losses of micro-batches with these counts are made."""
        return self.needs_terms or any(
            own is not None and (self.has_open(own) or self.may_lack(own)) for own in measured
        )

    @cached_property
    def is_of_groups(self) -> bool:
        """Whether it has terms that are means over groups of the same items, such as those of each class."""
        first, *others = [one for one in self.products if one] or [()]
        family = self._family(first)
        return any(self._family(one) == family and self.signed(one) != self.signed(first) for one in others)

    def _family(self, product: Product) -> "TermKey":
        return frozenset((self.counts[index].family, power) for index, power in product)

    def num_items(self, counts: Sequence[Any]) -> Any:
        """What the loss is a mean over, of counts that are numbers or tensors; of several terms, the first one.

        None: it is not divided by what is counted, or its terms are of groups, each of which a batch may lack.
        """
        product = next(filter(None, self.products), ())
        if self.divides_by_total or not product or self.is_of_groups:
            return None
        found: Any = 1.0
        for index, power in product:
            if not isinstance(counts[index], Tensor) and not counts[index]:
                return 0.0
            found = found * counts[index] ** -power
        return found

    def divided_by_total(self, natural: Count | None) -> "LossForm":
        """The form of a sum that the model divides by a number of the batch's; ``natural``: what the sum counts."""
        counts = () if natural is None else (natural,)
        return LossForm(counts=counts, products=((),), in_model=self.in_model, divides_by_total=True)

    def measure(self, inputs: Sequence[Any], sizes: Sequence[int]) -> list[Measured]:
        """The counts of micro-batches with as many samples. Waits for devices that hold inputs.

        Raises:
            NotCountedError: they cannot be counted.
        """
        rows: list[list[Any]] = []
        for part, num_samples in zip(inputs, sizes, strict=True):
            try:
                rows.append([one.of(part, num_samples) for one in (*self.counts, *map(without_floor, self.counts))])
            except Exception as error:  # any operation of the script's, on inputs of another form
                raise not_counted(error) from error
        read = numbers(rows)
        half = len(self.counts)
        return [Measured(tuple(row[:half]), tuple(row[half:])) for row in read]

    def divisor(self, product: Product, own: Measured) -> float:
        """What a term of a micro-batch is divided by."""
        return math.prod(own.used[index] ** -power for index, power in product)

    def share(self, product: Product, own: Measured, total: Sequence[float]) -> float:
        """The weight of a term of a micro-batch in that of the batch whose counts are ``total``; 0: it has no items.

        What is divided by a lower limit has no items, but may have a value: what detectors make of the background.
        """
        share = 1.0
        for index, power in product:
            divisor = max(total[index], self.floors[index])
            if not own.used[index] or not divisor:
                return 0.0
            share *= (own.used[index] / divisor) ** -power
        return share

    def weights(self, own: Sequence[Measured], total: Sequence[float]) -> list[float]:
        """The weight of each micro-batch's loss in that of the batch whose counts are ``total``; of terms: 1 or 0."""
        if not self.needs_terms:
            return [self.share(self.products[0], one, total) for one in own] if self.products else []
        return [float(any(self.share(product, one, total) for product in self.products)) for one in own]


def add_up(measured: Iterable[Measured]) -> tuple[float, ...]:
    """The counts of the whole."""
    return tuple(math.fsum(column) for column in zip(*(one.added for one in measured), strict=True))


def without_floor(count: Count) -> Count:
    """A count without a lower limit, such as ``clamp(min=1)`` or a small number that is added: limits do not add up."""
    return count if count.limit is None else count.limit[0]


def numbers(rows: Sequence[Sequence[Any]]) -> list[list[float]]:
    """The values as floats. Tensors are read together, so that the host waits for their device once."""
    flat = [value for row in rows for value in row]
    tensors = [value.detach().double().reshape(()) for value in flat if isinstance(value, Tensor)]
    read = iter(torch.stack(tensors).tolist() if tensors else ())
    return [[next(read) if isinstance(value, Tensor) else float(value) for value in row] for row in rows]


class ReplicaCounts(NamedTuple):
    """What the losses of the replicas' batches are means over.

    Attributes:
        num_items: of each replica: samples, or what the script counts.
        forms: a number for the form of each replica's loss, where it is known; else 0.
        counts: of each replica, where the forms are known; else empty.
    """

    num_items: Sequence[float]
    forms: Sequence[float]
    counts: Sequence[tuple[float, ...]]

    @property
    def total(self) -> list[float]:
        """The counts of all replicas together."""
        return [math.fsum(column) for column in zip(*self.counts, strict=True)] if self.are_known else []

    @property
    def are_known(self) -> bool:
        """Whether all replicas know the form of their loss."""
        return all(self.forms)

    def check(self) -> None:
        """Refuse batches that do not go together. On every rank alike.

        Raises:
            ConfigError: the replicas' losses are divided by different numbers.
            DataError: no batch has an item.
        """
        if not self.are_known:
            return
        if len(set(self.forms)) > 1:
            raise ConfigError(
                "the replicas' losses must be divided by the same numbers of items: the losses of some replicas are "
                "divided by others. Give the criterion a method num_items(inputs), which counts what the mean is over."
            )
        if self.counts[0] and not any(self.total) and self.forms[0] > 0:
            raise no_items()

    @property
    def has_global_total(self) -> bool:
        """Whether ``num_items_in_batch`` is that of all replicas, as transformers' Trainer passes it."""
        counted = self.total
        if len(self.num_items) == 1 or len(set(self.num_items)) > 1:
            return False
        # One replica's batch has 1 / num_replicas of the items; labels may count a few that the loss does not.
        return not counted or self.num_items[0] > math.sqrt(1 / len(self.num_items)) * counted[0]


def no_items() -> DataError:
    """The error of a step without any item."""
    return DataError(
        "the loss is a mean over no items: no replica's batch has any, such as a label that is not ignored. Check the "
        "labels, or leave out such batches, on all ranks alike."
    )
