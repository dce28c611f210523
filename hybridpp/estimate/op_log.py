"""What the operators of a run compute and move."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import numpy
import torch
from numpy.typing import NDArray
from torch import Tensor

from hybridpp.estimate.allocations import Allocation, AllocationLog, tensors_in
from hybridpp.nn.torch_private import (
    ATTENTION_BACKWARD_OPS,
    ATTENTION_OPS,
    GROUPED_MM,
    OpOverload,
    moves_nothing,
    storage_id,
)
from hybridpp.partition import FlopCounter

WAIT, POINTWISE = "wait", "pointwise"
# Operators by name. Without a kernel: memory is only reserved.
_EMPTY = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"}
# What they are given says only a size, or is written to.
_WRITING = {
    *("zeros", "ones", "full", "arange", "zeros_like", "ones_like", "full_like", "rand_like", "randn_like"),
    *("new_zeros", "new_ones", "new_full", "zero_", "fill_", "bernoulli_"),
}
# Of their first argument they read no more than they return.
_LOOKUPS = {"embedding", "index", "index_select", "gather"}
# They touch no more of their first argument than they are given to write.
_SCATTERS = {"index_add_", "index_put_", "index_put_impl_", "scatter_", "scatter_add_"}
# What compilers and hand-written kernels join to one kernel, beside what torch calls point-wise, or a reduction.
_JOINED = {
    *("sum", "mean", "amax", "amin", "var", "var_mean", "logsumexp"),
    *("softmax", "softmax_backward_data", "log_softmax", "log_softmax_backward_data"),
    *("native_layer_norm", "native_layer_norm_backward", "native_group_norm", "native_group_norm_backward"),
    *("fused_rms_norm", "fused_rms_norm_backward", "nll_loss_forward", "nll_loss_backward"),
    *("to_copy", "copy_", "clone", "cat", "constant_pad_nd", "slice_backward", "select_backward"),
    *("native_dropout", "native_dropout_backward", *_WRITING),
}
_TAGS = {torch.Tag.pointwise, getattr(torch.Tag, "reduction", torch.Tag.pointwise)}


class Op(NamedTuple):
    """One operator, or one communication.

    Attributes:
        event: of the log, when it had run.
        flops: floating-point operations of products; 0: it only moves numbers.
        num_bytes: that it reads and writes.
        dtype: of the numbers that it multiplies.
        message: kind of the communication; ``"wait"``: for the end of one; empty: it is an operator.
        kernel: ``"attention"``, ``"attention_backward"``, ``"experts"`` (products in groups), ``"pointwise"`` (what may
            be a part of one kernel with its neighbours), or empty: another one.
        joined_bytes: where neighbours of this kind are one kernel, what that reads and writes for this operator.
        begins_kernel: whether it is the first of such neighbours.
        age: of what a wait is for: communications that were started after it.
    """

    event: int
    flops: int
    num_bytes: int
    dtype: torch.dtype | None
    message: str = ""
    kernel: str = ""
    joined_bytes: int = 0
    begins_kernel: bool = True
    age: int = 0


class OpKind(NamedTuple):
    """What many operators of a run have in common: see :class:`Op`."""

    dtype: torch.dtype | None
    message: str
    kernel: str


_ROW = numpy.dtype(
    [
        *((name, numpy.int64) for name in ("event", "flops", "num_bytes", "joined_bytes")),
        *(("age", numpy.int32), ("kind", numpy.int16), ("begins_kernel", numpy.bool_)),
    ]
)


@dataclass(frozen=True, eq=False)
class Ops:
    """The operators of a run, in order: a model has tens of thousands, and a search keeps a hundred runs.

    Attributes:
        rows: of shape ``(number of operators,)``, with the fields of :class:`Op` that are numbers, and ``kind``.
        kinds: the kind with each number.
    """

    rows: NDArray[Any]
    kinds: tuple[OpKind, ...]

    @classmethod
    def of(cls, ops: Iterable[Op]) -> "Ops":
        """The table of these operators."""
        kinds: dict[OpKind, int] = {}
        rows = [
            (
                *(op.event, op.flops, op.num_bytes, op.joined_bytes, op.age),
                kinds.setdefault(OpKind(op.dtype, op.message, op.kernel), len(kinds)),
                op.begins_kernel,
            )
            for op in ops
        ]
        return cls(numpy.array(rows, dtype=_ROW), tuple(kinds))

    def __len__(self) -> int:
        return len(self.rows)

    def __iter__(self) -> Iterator[Op]:
        for event, flops, num_bytes, joined_bytes, age, kind, begins in self.rows.tolist():
            dtype, message, kernel = self.kinds[kind]
            yield Op(event, flops, num_bytes, dtype, message, kernel, joined_bytes, begins, age)

    def where(self, chosen: NDArray[numpy.bool_]) -> "Ops":
        """The chosen ones."""
        return Ops(self.rows[chosen], self.kinds)

    @property
    def are_messages(self) -> NDArray[numpy.bool_]:
        """Whether each is a communication, or waits for one."""
        is_message = numpy.array([bool(kind.message) for kind in self.kinds], dtype=bool)
        found: NDArray[numpy.bool_] = is_message[self.rows["kind"]]
        return found


class _Joined:
    """Operators in a row that may be one kernel: what is made and freed among them is neither written nor read."""

    def __init__(self) -> None:
        self._made: dict[int, tuple[int, Allocation]] = {}
        self._touched: set[int] = set()

    def read(self, arguments: list[tuple[int, int]]) -> int:
        """Bytes that the kernel reads more with these arguments: keys of their memory, and their bytes."""
        return sum(size for key, size in arguments if self._is_new(key))

    def _is_new(self, key: int) -> bool:
        is_new = key not in self._made and key not in self._touched
        self._touched.add(key)
        return is_new

    def make(self, key: int, index: int, allocation: Allocation) -> None:
        """Note what the operator with this number allocated."""
        self._made[key] = index, allocation

    def kept(self) -> list[tuple[int, int]]:
        """The numbers of operators whose results are alive, with the bytes of these."""
        return [(index, one.size) for index, one in self._made.values() if one.died is None]


class OpLog(AllocationLog):  # type: ignore[no-untyped-call]  # torch's __init_subclass__
    """Also records each operator."""

    def __init__(self) -> None:
        super().__init__()
        self._ops: list[Op] = []
        self._counter = FlopCounter()
        self._joined: _Joined | None = None
        self._num_messages = 0

    def _call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        # Not as a context of its own: each one that an operator passes takes as long as this log.
        return self._counter.counted(func, args, kwargs)

    def _run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if moves_nothing(func):
            return func(*args, **kwargs)
        before, event = self._counter.get_total_flops(), self.event
        result = super()._run(func, args, kwargs)
        given, returned = tensors_in((args, kwargs)), tensors_in(result)
        if (given or returned) and _name(func) not in _EMPTY:
            self._add(func, given, returned, self._counter.get_total_flops() - before, event)
        return result

    def _add(self, func: Any, given: list[Tensor], returned: list[Tensor], flops: int, event: int) -> None:
        name = _name(func)
        kernel = _product(func) if flops else _kernel(func)
        dtype = next((one.dtype for one in (*given, *returned) if one.is_floating_point()), None)
        op = Op(self.event, flops, _moved(name, given, returned), dtype, "", kernel)
        if kernel != POINTWISE:
            self._end_kernel()
            self._ops.append(op)
            return
        begins = self._joined is None
        joined = self._joined = self._joined or _Joined()
        read = joined.read([] if name in _WRITING else [(self._memory_of(one), _num_bytes(one)) for one in given])
        owned = {storage_id(one) for one in given}
        # What it writes in place was counted as read.
        written = sum(_num_bytes(one) for one in returned if storage_id(one) in owned)
        for one in returned:
            allocation = self.of(one)
            if allocation is not None and allocation.born > event:
                joined.make(self._memory_of(one), len(self._ops), allocation)
        self._ops.append(op._replace(joined_bytes=read + written, begins_kernel=begins))

    def _memory_of(self, tensor: Tensor) -> int:
        """A number that no other memory of the run has; addresses are given again to what comes later."""
        allocation = self.of(tensor)
        return -storage_id(tensor) if allocation is None else allocation.born

    def _end_kernel(self) -> None:
        for index, size in self._joined.kept() if self._joined else ():
            self._ops[index] = self._ops[index]._replace(joined_bytes=self._ops[index].joined_bytes + size)
        self._joined = None

    @property
    def ops(self) -> Ops:
        """In order; the last kernel has ended."""
        self._end_kernel()
        return Ops.of(self._ops)

    def note_message(self, kind: str, num_bytes: int) -> int:
        """Record the start of a communication; returns its number."""
        self._end_kernel()
        self._ops.append(Op(self.event, 0, num_bytes, None, kind))
        self._num_messages += 1
        return self._num_messages

    def note_wait(self, number: int) -> None:
        """Record that the rank goes on when a communication has ended."""
        self._end_kernel()
        self._ops.append(Op(self.event, 0, 0, None, WAIT, age=self._num_messages - number))


@cache
def _name(func: Any) -> str:
    """Of an operator, without the dash of those that have no function."""
    return str(func.overloadpacket.__name__).lstrip("_") if isinstance(func, OpOverload) else ""


@cache
def _kernel(func: Any) -> str:
    is_joined = _name(func) in _JOINED or (isinstance(func, OpOverload) and bool(_TAGS & set(func.tags)))
    return POINTWISE if is_joined else ""


@cache
def _product(func: Any) -> str:
    packet = func.overloadpacket if isinstance(func, OpOverload) else None
    if packet in ATTENTION_OPS:
        return "attention"
    if packet in ATTENTION_BACKWARD_OPS:
        return "attention_backward"
    return "experts" if packet is GROUPED_MM else ""


def _moved(name: str, given: list[Tensor], returned: list[Tensor]) -> int:
    """Bytes that an operator reads and writes."""
    written, read = sum(map(_num_bytes, returned)), list(map(_num_bytes, given))
    if name in _WRITING:
        return written
    if name == "copy_":
        return written + sum(read[1:])
    if name in _LOOKUPS and read:
        return min(read[0], written) + sum(read[1:]) + written
    if name in _SCATTERS and read:
        return 2 * min(read[0], sum(read[1:])) + sum(read[1:])
    return written + sum(read)


def _num_bytes(tensor: Tensor) -> int:
    """Of what a tensor has in memory: what is expanded is there once."""
    strides = tensor.stride()
    if 0 not in strides:
        return tensor.nbytes
    sizes = [size for size, stride in zip(tensor.shape, strides, strict=True) if stride or not size]
    return torch.Size(sizes).numel() * tensor.dtype.itemsize
