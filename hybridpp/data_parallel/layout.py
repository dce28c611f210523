"""Where parameters lie in flat buffers, and which part of them each replica updates. Pure: no tensors.

A bucket is a flat buffer. Parameters lie in it one after another, and it is divided into as many equal segments as
there are replicas. Gradients, weights and masters lie alike, so one layout serves all three: with ZeRO (Rajbhandari et
al., https://arxiv.org/abs/1910.02054), a replica has the optimizer state of its own segments.
"""

from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

# Parameters start at multiples of this many elements, so that vector loads of every kernel are aligned.
ALIGNMENT = 16
# A parameter is divided at multiples of this many elements from its start. Kernels that round the end of a tensor
# otherwise, and norms, whose squares are summed in blocks of this size, then give the same bits for it and its pieces.
GRAIN = 2048


class Slot(NamedTuple):
    """Where a parameter lies.

    Attributes:
        name: of the parameter.
        start: its first element in the bucket.
        size: its number of elements.
        shape, strides: of the view of the bucket that it is.
    """

    name: str
    start: int
    size: int
    shape: tuple[int, ...] = ()
    strides: tuple[int, ...] = ()


class Piece(NamedTuple):
    """The part of a parameter that lies in one segment.

    Attributes:
        name: of the parameter.
        start, stop: its elements, in the order in which the parameter lies in memory.
        offset: of ``start`` in the bucket.
        is_whole: whether it is all of the parameter.
        strides: those of the parameter.
        shape: its shape.
    """

    name: str
    start: int
    stop: int
    offset: int
    is_whole: bool
    strides: tuple[int, ...] = ()
    shape: tuple[int, ...] = ()

    @property
    def size(self) -> int:
        """Number of elements."""
        return self.stop - self.start


class ParameterInfo(NamedTuple):
    """What the layout needs to know of a parameter.

    Attributes:
        size: number of elements.
        nbytes: of its gradient.
        kind: parameters of different kinds (dtype, device) share no bucket.
        stages: of this rank that use it, in order. Those that other stages use share no bucket, so that a bucket is
            complete when its stages are.
        is_divisible: whether its pieces may be updated apart; else it lies in one segment.
        is_shared: whether ranks of one replica hold summands of its gradient, which are summed before the replicas'.
        shape, strides: of its gradient.
        units: of the rank's units that use it, in order, if weights are gathered by unit. Those that other units use
            share no bucket.
    """

    size: int
    nbytes: int
    kind: Hashable = None
    stages: tuple[int, ...] = ()
    is_divisible: bool = True
    is_shared: bool = False
    shape: tuple[int, ...] = ()
    strides: tuple[int, ...] = ()
    units: tuple[int, ...] = ()


@dataclass(frozen=True)
class BucketLayout:
    """The parameters of one bucket.

    Attributes:
        slots: the parameters, in order.
        segment_size: elements of a segment.
        num_segments: one per replica that divides it with others.
        stages: as of its parameters.
        is_shared: as of its parameters.
        units: as of its parameters.

    Example:
        >>> layout = divide_bucket({"weight": 6000, "bias": 10}, num_segments=2)
        >>> [piece[1:4] for piece in layout.pieces(0)], [piece[:3] for piece in layout.pieces(1)]
        ([(0, 4096, 0)], [('weight', 4096, 6000), ('bias', 0, 10)])
    """

    slots: tuple[Slot, ...]
    segment_size: int
    num_segments: int
    stages: tuple[int, ...] = ()
    is_shared: bool = False
    units: tuple[int, ...] = ()

    @property
    def size(self) -> int:
        """Elements of the bucket, with padding."""
        return self.segment_size * self.num_segments

    def segment(self, index: int) -> slice:
        """The elements of a segment."""
        return slice(index * self.segment_size, (index + 1) * self.segment_size)

    def gaps(self) -> Iterator[slice]:
        """The elements that belong to no parameter: padding."""
        end = 0
        for _, start, size, *_ in (*self.slots, Slot("", self.size, 0)):
            if start > end:
                yield slice(end, start)
            end = start + size

    def pieces(self, index: int) -> Iterator[Piece]:
        """What lies in a segment, in order. A parameter without elements lies in one, too: saves write it there."""
        low, high = index * self.segment_size, (index + 1) * self.segment_size
        for name, start, size, shape, strides in self.slots:
            if not size:
                # At the end of the last segment, where nothing follows it.
                if index == min(start // max(self.segment_size, 1), self.num_segments - 1):
                    yield Piece(name, 0, 0, start, True, strides, shape)
                continue
            first, last = max(start, low), min(start + size, high)
            if first < last:
                is_whole = last - first == size
                yield Piece(name, first - start, last - start, first, is_whole, strides, shape)

    def pieces_within(self, index: int) -> Iterator[Piece]:
        """The same with offsets from the start of the segment."""
        for piece in self.pieces(index):
            yield piece._replace(offset=piece.offset - index * self.segment_size)


@dataclass(frozen=True)
class ShardLayout:
    """The buckets of a rank's trainable parameters, alike on all replicas.

    Attributes:
        buckets: in the order in which a backward pass completes them.
        num_segments: number of replicas that divide the buckets among themselves.
        index: of this one among them.
        counts: whether what this replica has counts: False if another one has the same segments, and counts.
        pieces: what this replica updates, by name, in the order of the buckets.
    """

    buckets: tuple[BucketLayout, ...]
    num_segments: int
    index: int
    counts: bool = True
    pieces: Mapping[str, Piece] = field(init=False)

    def __post_init__(self) -> None:
        own = {piece.name: piece for bucket in self.buckets for piece in bucket.pieces(self.index)}
        object.__setattr__(self, "pieces", own)


def plan_buckets(
    parameters: Mapping[str, ParameterInfo], capacity_bytes: float, num_segments: int, index: int
) -> ShardLayout:
    """Put parameters into buckets.

    Args:
        parameters: trainable ones, by name, in the order of the forward.
        capacity_bytes: of a bucket; a larger parameter has a bucket of its own.
        num_segments: number of replicas.
        index: of this replica.
    """
    filled: list[tuple[int, list[str]]] = []
    open_buckets: dict[Hashable, tuple[list[str], int]] = {}
    # Backward reaches the last parameters first, so their bucket is complete first.
    for order, (name, info) in enumerate(reversed(list(parameters.items()))):
        key = (info.kind, info.stages, info.is_divisible, info.is_shared, info.units)
        names, nbytes = open_buckets.get(key, ([], 0))
        if names and nbytes + info.nbytes > capacity_bytes:
            names, nbytes = [], 0
        if not names:
            filled.append((order, names))
        names.append(name)
        open_buckets[key] = (names, nbytes + info.nbytes)
    last = {name: order for order, name in enumerate(reversed(list(parameters)))}
    # One that waits for an early parameter would keep those behind it from being reduced. Later stages are complete
    # first; what no stage uses is complete at the end.
    filled.sort(key=lambda entry: (-min(parameters[entry[1][0]].stages, default=-1), last[entry[1][-1]]))
    buckets = [_bucket(names, parameters, num_segments) for _, names in filled]
    return ShardLayout(tuple(buckets), num_segments, index)


def _bucket(names: Sequence[str], parameters: Mapping[str, ParameterInfo], num_segments: int) -> BucketLayout:
    sizes = {name: parameters[name].size for name in names}
    first = parameters[names[0]]
    placed = divide_bucket(sizes, num_segments) if first.is_divisible else distribute_bucket(sizes, num_segments)
    slots = tuple(
        slot._replace(shape=parameters[slot.name].shape, strides=parameters[slot.name].strides) for slot in placed.slots
    )
    return replace(placed, slots=slots, stages=first.stages, is_shared=first.is_shared, units=first.units)


def divide_bucket(sizes: Mapping[str, int], num_segments: int) -> BucketLayout:
    """A bucket whose segments divide parameters, at multiples of :data:`GRAIN` from their starts.

    At most ``2 * GRAIN`` elements per segment are padding, besides the alignment.
    """
    unit = GRAIN if num_segments > 1 else ALIGNMENT
    total = sum(_up(size, ALIGNMENT) for size in sizes.values())
    segment_size = max(unit, _up(-(-total // num_segments), unit))
    while (slots := _slots(sizes, segment_size, num_segments)) is None:
        segment_size += unit
    return BucketLayout(slots, segment_size, num_segments)


def _slots(sizes: Mapping[str, int], segment_size: int, num_segments: int) -> tuple[Slot, ...] | None:
    """Parameters one after another, moved so that segments divide them where they may; None: they do not fit."""
    slots, end = [], 0
    for name, size in sizes.items():
        start = _up(end, ALIGNMENT)
        border = _up(start + 1, segment_size)
        if start + size > border:
            start += (border - start) % GRAIN
        end = start + size
        slots.append(Slot(name, start, size))
    return tuple(slots) if end <= segment_size * num_segments else None


def distribute_bucket(sizes: Mapping[str, int], num_segments: int) -> BucketLayout:
    """A bucket whose segments hold whole parameters: the largest first, each into the segment with the least in it."""
    loads = [0] * num_segments
    members: list[list[str]] = [[] for _ in range(num_segments)]
    for name in sorted(sizes, key=lambda name: -sizes[name]):
        least = loads.index(min(loads))
        loads[least] += _up(sizes[name], ALIGNMENT)
        members[least].append(name)
    segment_size = max(ALIGNMENT, *loads)
    slots = [slot for index, names in enumerate(members) for slot in _in_order(names, sizes, index * segment_size)]
    return BucketLayout(tuple(slots), segment_size, num_segments)


def _in_order(names: Iterable[str], sizes: Mapping[str, int], start: int) -> Iterator[Slot]:
    for name in names:
        yield Slot(name, start, sizes[name])
        start += _up(sizes[name], ALIGNMENT)


def _up(number: int, multiple: int) -> int:
    """The number, rounded up to a multiple."""
    return -(-number // multiple) * multiple
