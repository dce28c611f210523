"""Weights that were written where torch counts nothing: through ``.data``, numpy or DLPack."""

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from hybridpp.cluster import HostCopy
from hybridpp.errors import ConfigError
from hybridpp.nn.torch_private import has_no_data

# Words of 64 bits, in which torch sums ten times as fast as in smaller integers. Columns: a prime number, so that no
# shape of a weight puts elements that a script may exchange into one column. Rows: what fits into a processor's cache.
_WORD = 8
_COLUMNS = 1021
_ROWS = 16
_BLOCK = _COLUMNS * _ROWS
# Words whose columns are summed together: their sums take a 16th of their memory.
_AT_ONCE = 1 << 25
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class _Blocks(NamedTuple):
    """What is summed of weights on one device.

    Attributes:
        large: flat views of weights as words, in whole blocks, by name.
        rest: what of each weight is in no whole block, as integers of its size, with its name; by that size.
        factors: one for each column.
    """

    large: dict[str, Tensor]
    rest: dict[int, list[tuple[str, Tensor]]]
    factors: Tensor


class WriteWatch:
    """Compares all of all weights, in every step, with what they held: by sums of their bits.

    A weight is summed in blocks of 128 KiB. A block's number is a sum of its words of 64 bits, with a factor for each
    column of words. It differs wherever an element was written, and where two were exchanged, unless these are a
    multiple of 8,168 bytes apart. This reads a weight twice per step, at the speed of memory.

    On the CPU, what was written is known at once. On other devices the host does not wait: the next call raises.

    Args:
        waits: whether the host reads the result at once; None: on the CPU.

    Attributes:
        is_known: whether there is something to compare with; if not, compare everything with what it was made of.
    """

    def __init__(self, *, waits: bool | None = None) -> None:
        self.is_known = False
        self._waits = waits
        # What memory the weights have, and of which dtype they are.
        self._memory: dict[str, tuple[int, torch.dtype]] = {}
        self._blocks = _Blocks({}, {}, torch.empty(0))
        self._before = torch.empty(0, dtype=torch.int64)
        self._late: HostCopy | None = None

    def note(self, weights: Mapping[str, Tensor]) -> None:
        """Remember what weights hold, by name: the same ones at every call."""
        if any(has_no_data(weight) for weight in weights.values()):
            self.is_known = False
            return
        memory = {name: _memory_of(weight) for name, weight in weights.items()}
        if memory != self._memory:
            self._memory, self._blocks = memory, _blocks_of(weights)
        self._before = _sums(self._blocks)
        self.is_known = True

    def written(self, weights: Mapping[str, Tensor], counted: Collection[str] = ()) -> set[str]:
        """The names of weights that may not hold what :meth:`note` saw; all others do.

        Args:
            weights: as in :meth:`note`.
            counted: those of which the caller knows that they were written to.

        Raises:
            ConfigError: see :meth:`check`.
        """
        moved = self.check(weights)
        differs = _sums(self._blocks) != self._before
        known = moved.union(counted)
        waits = self._waits
        if waits or (waits is None and differs.device.type == "cpu"):
            return known.union(*self._owners_of(differs)) if differs.any() else known
        # Of what shares a block with a weight that was written to, nothing is known.
        for part, names in self._parts(differs) if known else ():
            if known.intersection(names):
                known.update(names)
                part.zero_()
        self._late = HostCopy([differs.any().double().reshape(1)], [], early=True)
        return known

    def check(self, weights: Mapping[str, Tensor]) -> set[str]:
        """The names of weights that were given other memory.

        Raises:
            ConfigError: it is of another dtype; or on a device that the host does not wait for, the last call of
                :meth:`written` did not say of a weight that was written to that it was.
        """
        moved = {name for name, weight in weights.items() if self._memory.get(name) != _memory_of(weight)}
        for name in moved:
            dtype, before = weights[name].dtype, self._memory[name][1]
            if dtype is not before:
                raise ConfigError(
                    f"{name} was given a tensor of {dtype} ({name}.data = ..., or model.to(...)): the model computes "
                    f"in {before}. Write in place, under torch.no_grad()."
                )
        late, self._late = self._late, None
        if late is not None and any(late.read()[0]):
            raise ConfigError(
                "before the last step, weights were written where torch counts nothing (parameter.data, DLPack), so "
                "the step did not take them over. Write to the parameter itself, under torch.no_grad()."
            )
        return moved

    def _parts(self, numbers: Tensor) -> Iterator[tuple[Tensor, list[str]]]:
        """Views of numbers of blocks, in the order of :func:`_sums`, with the names of the weights in them."""
        owners = [(words.numel() // _BLOCK, [name]) for name, words in self._blocks.large.items()]
        owners += [(_num_blocks(size, rest), [name for name, _ in rest]) for size, rest in self._blocks.rest.items()]
        parts = torch.split(numbers, [number for number, _ in owners])
        return ((part, names) for part, (_, names) in zip(parts, owners, strict=True))

    def _owners_of(self, differs: Tensor) -> Iterator[list[str]]:
        return (names for part, names in self._parts(differs) if part.any())


def _memory_of(weight: Tensor) -> tuple[int, torch.dtype]:
    return weight.data_ptr(), weight.dtype


def _blocks_of(weights: Mapping[str, Tensor]) -> _Blocks:
    large: dict[str, Tensor] = {}
    rest: defaultdict[int, list[tuple[str, Tensor]]] = defaultdict(list)
    for name, weight in weights.items():
        flat = _as_integers(weight.detach())
        size = flat.element_size()
        if flat.dim() == 1:
            # Words lie at multiples of their size.
            first = -flat.storage_offset() % (_WORD // size)
            covered = max(flat.numel() - first, 0) * size // (_BLOCK * _WORD) * (_BLOCK * _WORD) // size
            if covered:
                large[name] = flat[first : first + covered].view(torch.int64)
                rest[size].append((name, flat[:first]))
                flat = flat[first + covered :]
        rest[size].append((name, flat))
    generator = torch.Generator().manual_seed(0)
    # Odd: a product with one is zero only if the other factor is.
    factors = torch.randint(-(2**62), 2**62, (_COLUMNS,), generator=generator) * 2 + 1
    return _Blocks(large, dict(rest), factors.to(next(iter(weights.values())).device))


def _as_integers(weight: Tensor) -> Tensor:
    """A view of all elements in the order of the memory: flat, but of a weight with gaps."""
    if weight.is_complex():
        weight = torch.view_as_real(weight)
    strides = weight.stride()
    ordered = weight.permute(sorted(range(weight.dim()), key=lambda dim: -strides[dim]))
    flat = ordered.view(-1) if ordered.is_contiguous() else ordered
    return flat.view(_INTEGERS[weight.element_size()])


def _num_blocks(size: int, rest: Sequence[tuple[str, Tensor]]) -> int:
    return -(-sum(one.numel() for _, one in rest) * size // (_BLOCK * _WORD))


def _sums(blocks: _Blocks) -> Tensor:
    """A number for each block: of large weights, then of what is left of all, by size of elements."""
    found, waiting, num_waiting = [], list[Tensor](), 0
    for words in (*blocks.large.values(), *(_joined(size, rest) for size, rest in blocks.rest.items())):
        waiting.append(words)
        num_waiting += words.numel()
        if num_waiting >= _AT_ONCE:
            found.append(_numbers(waiting, blocks.factors))
            waiting, num_waiting = [], 0
    return torch.cat([*found, _numbers(waiting, blocks.factors)])


def _joined(size: int, rest: Sequence[tuple[str, Tensor]]) -> Tensor:
    """A copy of tensors as whole blocks of words."""
    flat = [one.reshape(-1) for _, one in rest]
    missing = -sum(one.numel() for one in flat) % (_BLOCK * _WORD // size)
    return torch.cat([*flat, flat[0].new_zeros(missing)]).view(torch.int64)


def _numbers(weights: Sequence[Tensor], factors: Tensor) -> Tensor:
    sizes = [words.numel() // _BLOCK for words in weights]
    columns = torch.empty(sum(sizes), _COLUMNS, dtype=torch.int64, device=factors.device)
    for words, part in zip(weights, torch.split(columns, sizes), strict=True):
        torch.sum(words.view(-1, _ROWS, _COLUMNS), 1, out=part)
    return columns.mul_(factors).sum(1)
