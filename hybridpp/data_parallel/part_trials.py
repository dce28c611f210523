"""Find what makes gradients of gradients that, called for parts of a batch, does not give the parts of one result."""

from collections.abc import Callable, Collection, Sequence
from functools import partial

import torch
from torch import Tensor

from hybridpp.data_parallel.hook_checks import GradientFactor, differ, factor_for, wave
from hybridpp.data_parallel.sources import GradientSource

GradientList = Sequence[Tensor | None]
Replace = Callable[[Tensor], Tensor]

NOT_LINEAR = "is not linear (it clips or normalises, for example)"
TOGETHER = "makes something of all samples there together (their norm or mean, for example)"

# Of a single sample, in the place of several.
_COPIES = 4
# By how much other samples are made larger: a step of 8 bits for all is still below the numbers that are compared.
_LARGER = 8.0


class PartTrial:
    """Further calls of what makes gradients of gradients, with large ones, so that limits are reached.

    Where weights get the results, those of two gradients must add up to that of their sum. A sample's may be anything
    of the sample's own gradients. That others change it is told of a function that is not linear; or, as a mean over
    samples is, of one that keeps nothing of the forward, where the forward may have put them together as well.

    Args:
        call: gives what is made of gradients; the second argument is called for each tensor that is kept of the
            forward, if it is not None.
        given: gradients that it is called with.
        factor: by which gradients are multiplied meanwhile.
    """

    def __init__(
        self, call: Callable[[GradientList, Replace | None], GradientList], given: GradientList, factor: GradientFactor
    ):
        self._call, self._factor = call, factor
        tensors = [one for one in given if one is not None]
        largest = max((float(one.abs().max()) for one in tensors if one.numel()), default=0.0)
        self.is_known = 0 < largest < float("inf")
        self._multiple = factor_for(2 * _LARGER * largest, {one.dtype for one in tensors}) if self.is_known else 1.0
        self._largest = largest * self._multiple
        # Of none of the values that were given, so that replicas find the same.
        self._base = [None if one is None else self._largest * wave(one, 1.0) for one in given]

    def found(self, source: GradientSource, of_weights: Collection[int], *, keeps_samples: bool) -> str:
        """What of its results would be wrong in parts, as the end of a sentence; empty: nothing that can be told.

        Args:
            source: of what the gradients are of.
            of_weights: indices of the results that are gradients of weights.
            keeps_samples: whether it uses anything of the forward.
        """
        if not self.is_known:
            return ""
        is_scalar = all(one is None or not one.dim() for one in self._base)
        if source.weight or is_scalar:
            return NOT_LINEAR if self.is_not_linear() and self._repeats() else ""
        if source.num_samples == 1:
            found = [self._repeated(dim)._found(_COPIES, [dim], of_weights, keeps_samples) for dim in self._dims(1)]
            return found[0] if found and all(found) else ""
        return self._found(source.num_samples, self._dims(source.num_samples), of_weights, keeps_samples)

    def is_not_linear(self) -> bool:
        """Whether what it makes of two gradients does not add up to what it makes of their sum."""
        zero = _finite(self._run([None if one is None else torch.zeros_like(one) for one in self._base]))
        own = self._run(self._base)
        # With the same signs, so that limits are; and with others.
        alike = [None if one is None else one * (1.25 + 0.75 * wave(one, 2.3)) for one in self._base]
        unlike = [None if one is None else self._largest * wave(one, 1.7) for one in self._base]
        for other in (alike, unlike):
            parts = own, self._run(other)
            total = self._run([None if one is None else one + two for one, two in _pairs(self._base, other)])
            if any(map(_add_up_to_else, parts[0], parts[1], zero, total)):
                return True
        return False

    def _repeated(self, dim: int) -> "PartTrial":
        """The trial of one sample, along this dimension, with copies of the sample."""

        def repeated(one: Tensor) -> Tensor:
            return torch.cat([one] * _COPIES, dim) if one.dim() > max(dim, 1) and one.size(dim) == 1 else one

        given = [None if one is None else repeated(one) for one in self._base]
        return PartTrial(lambda gradients, _: self._call(gradients, repeated), given, self._factor)

    def _found(
        self, num_samples: int | None, dims: Sequence[int], of_weights: Collection[int], keeps_samples: bool
    ) -> str:
        """What is wrong along all dimensions that may be those of samples."""
        found = {dim: self._along(dim, num_samples, of_weights) for dim in dims}
        # A mean over another dimension is linear, too: that of samples must be known.
        exact = [dim for dim in dims if self._size(dim) == num_samples]
        is_sure = exact == [*dims] or 0 in exact
        needed = exact if is_sure and not keeps_samples else dims
        if not needed or not all(found[dim] for dim in needed):
            return ""
        first = found[needed[0]]
        if first == TOGETHER and not (all(found.values()) and self.is_not_linear()):
            # Of two samples, each may have got the other's.
            is_mean = is_sure and not keeps_samples and num_samples != 2
            is_mean = is_mean and all(self._are_all_together(dim) for dim in needed)
            first = first if is_mean else ""
        return first if first and self._repeats() else ""

    def _dims(self, num_samples: int | None) -> list[int]:
        """The dimensions that may be those of samples, 0 and 1 at most."""
        shapes = [one.shape for one in self._base if one is not None and one.dim()]
        sizes = {dim: {shape[dim] for shape in shapes if len(shape) > dim} for dim in (0, 1)}
        shared = {dim: next(iter(found)) for dim, found in sizes.items() if len(found) == 1}
        if num_samples is None:
            return [dim for dim, size in shared.items() if size > 1]
        if num_samples == 1:  # each could be that of its elements
            return [dim for dim, size in shared.items() if size == 1]
        return [dim for dim, size in shared.items() if size and size % num_samples == 0]

    def _size(self, dim: int) -> int:
        return next(one.size(dim) for one in self._base if one is not None and one.dim() > dim)

    def _along(self, dim: int, num_samples: int | None, of_weights: Collection[int]) -> str:
        """What is wrong, if samples are along a dimension."""
        size = self._size(dim)
        count = num_samples or size
        start = count // 2 * (size // count)
        full = self._run(self._base)
        others = self._run(self._from(dim, start, _larger))
        own = [
            index
            for index, one in enumerate(full)
            if one is not None and index not in of_weights and one.dim() > dim and one.size(dim) == size
        ]
        kept = partial(torch.narrow, dim=dim, start=0, length=start)
        for index, (one, two) in ((index, (full[index], others[index])) for index in own):
            if one is None or two is None or not differ(kept(one), kept(two)):
                continue
            if self._most_depend_on(size - size // count, size, index, dim):
                return TOGETHER
        if len(own) == len(full):
            return ""
        zero = _finite(self._run(self._from(dim, 0, torch.zeros_like)))
        first = self._run(self._from(dim, start, torch.zeros_like))
        second = self._run(self._from(dim, start, lambda part: part, zeros_before=True))
        sums = enumerate(zip(first, second, zero, full, strict=True))
        return NOT_LINEAR if any(index not in own and _add_up_to_else(*four) for index, four in sums) else ""

    def _most_depend_on(self, start: int, end: int, index: int, dim: int) -> bool:
        """Whether in a result most samples change with those of a part: what moves samples about changes few."""
        one, two = self._run(self._base)[index], self._run(self._from(dim, start, _larger, end=end))[index]
        if one is None or two is None:
            return False
        rows = (one != two).transpose(0, dim).flatten(1).any(1)
        others = torch.cat([rows[:start], rows[end:]])
        return float(others.double().mean()) > 0.5

    def _are_all_together(self, dim: int) -> bool:
        """Whether in a result most samples change with the first and with the last: not so in a sum from one on."""
        size = self._size(dim)
        return any(
            self._most_depend_on(0, 1, index, dim) and self._most_depend_on(size - 1, size, index, dim)
            for index, one in enumerate(self._run(self._base))
            if one is not None and one.dim() > dim and one.size(dim) == size
        )

    def _from(
        self, dim: int, start: int, change: Replace, *, end: int | None = None, zeros_before: bool = False
    ) -> list[Tensor | None]:
        """The gradients with the samples from ``start`` on changed, up to an end; zero before, or as they are."""

        def changed(one: Tensor) -> Tensor:
            if one.dim() <= dim:
                return one
            made = torch.zeros_like(one) if zeros_before else one.clone()
            length = (one.size(dim) if end is None else end) - start
            made.narrow(dim, start, length).copy_(change(one.narrow(dim, start, length)))
            return made

        return [None if one is None else changed(one) for one in self._base]

    def _run(self, gradients: GradientList) -> list[Tensor | None]:
        with torch.no_grad(), self._factor.inside(self._multiple):
            # What is given may be written to, and returned.
            return list(self._call([None if one is None else one.clone() for one in gradients], None))

    def _repeats(self) -> bool:
        """Whether it makes the same of the same again."""
        return not any(differ(one, two) for one, two in _pairs(self._run(self._base), self._run(self._base)))


def _pairs(ones: GradientList, others: GradientList) -> list[tuple[Tensor, Tensor]]:
    """Those of two lists that are both there."""
    pairs = zip(ones, others, strict=True)
    return [(one, two) for one, two in pairs if one is not None and two is not None]


def _larger(part: Tensor) -> Tensor:
    return _LARGER * part.abs()


def _finite(results: GradientList) -> GradientList:
    """Results for zeros; of a function that has none for them (a norm divides), zeros."""
    return [None if one is None else one if one.isfinite().all() else torch.zeros_like(one) for one in results]


def _add_up_to_else(one: Tensor | None, two: Tensor | None, zero: Tensor | None, total: Tensor | None) -> bool:
    """Whether what is made of two gradients is not what is made of their sum; ``zero``: what is made of none."""
    if one is None or two is None or zero is None or total is None:
        return False
    return differ(one.double() + two.double() - zero.double(), total)
