"""Which parts of a full tensor a rank holds, as boxes. Pure: no tensors.

What a rank holds of a parameter is cut twice: tensor parallelism takes ranges of one dimension, and ZeRO a range of the
elements in the order in which they lie in memory. Both come to boxes of the full tensor, which mean the same in every
layout: this is what checkpoints store.
"""

from collections.abc import Iterator, Sequence
from math import prod
from typing import NamedTuple


class Box(NamedTuple):
    """A range of each dimension of a tensor.

    Attributes:
        start: of each range.
        shape: its lengths.
    """

    start: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        """Number of elements."""
        return prod(self.shape)

    @property
    def slices(self) -> tuple[slice, ...]:
        """The ranges, to index a tensor with."""
        return tuple(slice(start, start + length) for start, length in zip(self.start, self.shape, strict=True))

    def intersection(self, other: "Box") -> "Box | None":
        """What lies in both; None: nothing does."""
        low = tuple(map(max, self.start, other.start))
        ends = ((a + n, b + m) for a, n, b, m in zip(*self, *other, strict=True))
        shape = tuple(min(end) - first for first, end in zip(low, ends, strict=True))
        return Box(low, shape) if all(length > 0 for length in shape) else None

    def seen_from(self, origin: Sequence[int]) -> "Box":
        """The same box with its start counted from ``origin``."""
        return Box(tuple(a - b for a, b in zip(self.start, origin, strict=True)), self.shape)


class Region(NamedTuple):
    """A box of a full tensor that a rank holds.

    Attributes:
        box: in the full tensor.
        local: where it starts in the rank's tensor.
    """

    box: Box
    local: tuple[int, ...]

    def inside(self, local: Box) -> "Region | None":
        """The part of it that lies in a box of the rank's tensor."""
        common = Box(self.local, self.box.shape).intersection(local)
        if common is None:
            return None
        moved = tuple(g + c - o for g, c, o in zip(self.box.start, common.start, self.local, strict=True))
        return Region(Box(moved, common.shape), common.start)


def full_box(shape: Sequence[int]) -> Box:
    """All of a tensor."""
    return Box((0,) * len(shape), tuple(shape))


def shard_regions(
    full_shape: Sequence[int],
    dim: int,
    pieces: Sequence[tuple[int, int]],
    rank: int,
    size: int,
    *,
    first_copies: bool,
) -> list[Region]:
    """What a tensor-parallel rank holds of a tensor, without padding.

    Args:
        full_shape: of the tensor.
        dim: the divided dimension.
        pieces: width along it, and number of neighbouring ranks that hold the same, of each evenly divided piece.
        rank: the rank.
        size: number of ranks.
        first_copies: leave out what a rank before it holds, too.

    Example:
        >>> shard_regions((7,), 0, [(4, 1), (3, 2)], rank=1, size=2, first_copies=False)[1]
        Region(box=Box(start=(4,), shape=(3,)), local=(2,))
    """
    regions, before, local_before = [], 0, 0
    for width, copies in pieces:
        local_width = -(-width * copies // size)
        start = min(rank // copies * local_width, width)
        length = min(local_width, width - start)
        if length and not (first_copies and rank % copies):
            shape = (*full_shape[:dim], length, *full_shape[dim + 1 :])
            regions.append(
                Region(
                    Box(_at(dim, before + start, len(shape)), shape),
                    _at(dim, local_before, len(shape)),
                )
            )
        before, local_before = before + width, local_before + local_width
    return [region for region in regions if region.box.size]


def _at(dim: int, position: int, num_dims: int) -> tuple[int, ...]:
    return tuple(position if each == dim else 0 for each in range(num_dims))


def range_boxes(shape: Sequence[int], order: Sequence[int], start: int, stop: int) -> list[Box]:
    """The boxes that the elements from ``start`` to ``stop`` of a tensor are, counted as they lie in memory.

    Args:
        shape: of the tensor.
        order: its dimensions from the outermost to the innermost in memory: (0, 1, 2) where it is contiguous.
        start, stop: number of the first element, and of the one after the last.

    Returns:
        At most ``2 * len(shape) - 1`` boxes, in the order of memory; each is one range of it.

    Example:
        >>> [tuple(box) for box in range_boxes((3, 4), (0, 1), 2, 9)]
        [((0, 2), (1, 2)), ((1, 0), (1, 4)), ((2, 0), (1, 1))]
    """
    back = [list(order).index(dim) for dim in range(len(shape))]
    return [
        Box(tuple(box.start[i] for i in back), tuple(box.shape[i] for i in back))
        for box in _row_major(tuple(shape[dim] for dim in order), start, stop)
    ]


def _row_major(shape: tuple[int, ...], start: int, stop: int) -> Iterator[Box]:
    if start >= stop:
        return
    if not shape:
        yield Box((), ())
        return
    inner = prod(shape[1:])
    (first, low), (last, high) = divmod(start, inner), divmod(stop, inner)
    if first == last:
        yield from _in_row(first, _row_major(shape[1:], low, high))
        return
    if low:
        yield from _in_row(first, _row_major(shape[1:], low, inner))
        first += 1
    if first < last:
        yield Box((first, *[0] * (len(shape) - 1)), (last - first, *shape[1:]))
    yield from _in_row(last, _row_major(shape[1:], 0, high))


def _in_row(row: int, boxes: Iterator[Box]) -> Iterator[Box]:
    for box in boxes:
        yield Box((row, *box.start), (1, *box.shape))


def split_box(box: Box, max_size: int) -> Iterator[Box]:
    """Boxes of at most ``max_size`` elements that are the box together."""
    if box.size <= max(1, max_size):
        yield box
        return
    # The first dimension of several: the parts of a contiguous tensor are contiguous then.
    dim = next(dim for dim, length in enumerate(box.shape) if length > 1)
    length = max(1, max_size // (box.size // box.shape[dim]))
    for offset in range(0, box.shape[dim], length):
        start, shape = list(box.start), list(box.shape)
        start[dim], shape[dim] = box.start[dim] + offset, min(length, box.shape[dim] - offset)
        yield from split_box(Box(tuple(start), tuple(shape)), max_size)
