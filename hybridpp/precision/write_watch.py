"""Weights that were written where torch counts nothing: through ``.data``, numpy or DLPack."""

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from hybridpp.cluster import HostCopy, get_dist_logger
from hybridpp.errors import ConfigError
from hybridpp.nn.bit_hash import bit_hash
from hybridpp.nn.torch_private import has_no_data

# Elements: smaller weights are compared whole.
_WHOLE = 1024
# Of larger ones, this many elements are.
_SAMPLES = 64
# Steps in which all of all weights is hashed; and the share of them that is in each later one, in turn.
_FIRST_STEPS = 8
_SHARES = 32
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class WriteWatch:
    """Compares weights by value, as far as that costs nothing that could be measured.

    In each step it compares small weights, 64 elements of each larger one, and hashes: of all weights in the first 8
    steps, and in each later one of one in 32, in turn, and of those that were found written before. So a script
    that writes in its first steps is seen in every step; one that begins later, and changes few elements of large
    weights, within 32.

    On the CPU, what was written is known at once. On other devices the host does not wait: the next step raises.

    Attributes:
        is_known: whether there is something to compare with; if not, compare everything with what it was made of.
    """

    def __init__(self) -> None:
        self.is_known = False
        self._round = 0
        self._weights: dict[str, Tensor] = {}
        # Flat views of the weights; what memory they have, and of which dtype they are.
        self._flat: dict[str, Tensor] = {}
        self._memory: dict[str, tuple[int, torch.dtype]] = {}
        self._samples: dict[torch.dtype, dict[str, Tensor]] = {}
        self._before: dict[torch.dtype, Tensor] = {}
        self._hashes: dict[str, Tensor] = {}
        self._always: set[str] = set()
        self._late: HostCopy | None = None
        self._has_warned = False

    def note(self, weights: Mapping[str, Tensor]) -> None:
        """Remember what weights hold, by name: the same ones at every call."""
        if any(has_no_data(weight) for weight in weights.values()):
            self.is_known = False
            return
        if {name: _memory_of(weight) for name, weight in weights.items()} != self._memory:
            self._take(weights)
        self._before = {dtype: torch.cat([*samples.values()]) for dtype, samples in self._samples.items()}
        self._hashes = {name: bit_hash(self._flat[name]) for name in self._hashed()}
        self._round += 1
        self.is_known = True

    def _take(self, weights: Mapping[str, Tensor]) -> None:
        self._memory = {name: _memory_of(weight) for name, weight in weights.items()}
        self._flat = {name: _flat(weight.detach()) for name, weight in weights.items()}
        self._samples = {}
        for name, flat in self._flat.items():
            every = 1 if flat.numel() <= _WHOLE else flat.numel() // _SAMPLES | 1
            self._samples.setdefault(flat.dtype, {})[name] = flat[::every]

    def _hashed(self) -> Iterator[str]:
        large = [name for name, flat in self._flat.items() if flat.numel() > _WHOLE]
        for number, name in enumerate(large):
            if self._round < _FIRST_STEPS or number % _SHARES == self._round % _SHARES or name in self._always:
                yield name

    def written(self, weights: Mapping[str, Tensor]) -> set[str]:
        """The names of weights that do not hold what :meth:`note` saw.

        Raises:
            ConfigError: a weight was given memory of another dtype; or on a device that the host does not wait for, one
                was written before the last step.
        """
        moved = {name for name, weight in weights.items() if self._memory.get(name) != _memory_of(weight)}
        for name in moved:
            dtype, before = weights[name].dtype, self._memory[name][1]
            if dtype is not before:
                raise ConfigError(
                    f"{name} was given a tensor of {dtype} ({name}.data = ..., or model.to(...)): the model computes "
                    f"in {before}. Write in place, under torch.no_grad()."
                )
        if next(iter(weights.values())).device.type == "cpu":
            found = {name for name in self._differing() if name not in moved}
            self._always.update(found)
            self._warn(sorted(found))
            return found | moved
        self._look_later()
        return moved

    def _differing(self) -> Iterator[str]:
        for dtype, samples in self._samples.items():
            before = self._before[dtype]
            now = torch.cat([*samples.values()])
            if not torch.equal(now, before):
                sizes = [sample.numel() for sample in samples.values()]
                pairs = zip(samples, torch.split(now, sizes), torch.split(before, sizes), strict=True)
                yield from (name for name, one, other in pairs if not torch.equal(one, other))
        yield from (name for name, value in self._hashes.items() if not torch.equal(bit_hash(self._flat[name]), value))

    def _look_later(self) -> None:
        late, differing = self._late, []
        for dtype, samples in self._samples.items():
            differing.append((torch.cat([*samples.values()]) != self._before[dtype]).any())
        differing += [bit_hash(self._flat[name]) != value for name, value in self._hashes.items()]
        numbers = torch.stack(differing).any().double().reshape(1)
        self._late = HostCopy([numbers], [], early=True)
        if late is not None and any(late.read()[0]):
            raise ConfigError(
                "before the last step, weights were written where torch counts nothing (parameter.data, DLPack), so "
                "the step did not take them over. Write to the parameter itself, under torch.no_grad()."
            )

    def _warn(self, names: list[str]) -> None:
        if names and not self._has_warned:
            self._has_warned = True
            more = f" and {len(names) - 1} more" if len(names) > 1 else ""
            get_dist_logger().warning(
                f"{names[0]}{more} was written where torch counts nothing (parameter.data, numpy, DLPack). It was "
                "seen, and training goes on with it; but few elements of a large weight that are written so once may "
                "not be seen. Write to the parameter itself, under torch.no_grad().",
                ranks=[0],
            )


def _memory_of(weight: Tensor) -> tuple[int, torch.dtype]:
    return weight.data_ptr(), weight.dtype


def _flat(weight: Tensor) -> Tensor:
    """A view of all elements as integers, in the order of the memory."""
    if weight.is_complex():
        weight = torch.view_as_real(weight)
    strides = weight.stride()
    order = sorted(range(weight.dim()), key=lambda dim: -strides[dim])
    return weight.permute(order).view(-1).view(_INTEGERS[weight.element_size()])
