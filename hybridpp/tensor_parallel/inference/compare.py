"""Run a divided block on as many in-process ranks as it is divided for, and compare it with the whole one by number."""

from collections.abc import Iterator, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from hybridpp.cluster import Loopback, current_world
from hybridpp.tensor_parallel.division import Division, Part
from hybridpp.tensor_parallel.inference.numbers import Sketch, close, largest
from hybridpp.tensor_parallel.inference.run import Outcome, Whole
from hybridpp.tensor_parallel.inference.share import divide


class Agreement(NamedTuple):
    """A division that gives the whole block's results and gradients.

    Attributes:
        division: as it was tried, and which results have to be put together.
        summed: the parameters that every rank has whole and whose gradient is the sum of the ranks' (they are used on
            divided activations).
    """

    division: Division
    summed: frozenset[str]


def compare(whole: Whole, division: Division, tp_size: int) -> Agreement | None:
    """Whether a division gives the whole block's results and gradients; None where it does not."""
    ranks = _run(whole, division, tp_size)
    if ranks is None:
        return None
    if ranks[0].gradients:
        found = _agreement(whole, division, ranks)
        arguments = _summed_arguments(whole, ranks) if found is None else {}
        if not arguments:
            return found
        more = division | Division(arguments=arguments | dict(division.arguments))
        return _agreement(whole, more, _run(whole, more, tp_size))
    for results in _partial(whole, ranks[0], tp_size):
        more = division | Division(results=results)
        found = _agreement(whole, more, _run(whole, more, tp_size))
        if found is not None:
            return found
    return None


def _run(whole: Whole, division: Division, tp_size: int) -> list[Outcome] | None:
    def run() -> Outcome:
        group = current_world().split([range(tp_size)])
        assert group is not None
        return Outcome(divide(whole.block, division, group), whole.call, whole.outcome)

    try:
        return Loopback(tp_size).run(run)
    except Exception:
        return None  # whatever a wrong guess makes of a block


def _summed_arguments(whole: Whole, ranks: list[Outcome]) -> dict[tuple[str, int], Part]:
    """Arguments that every rank reads whole on its part of activations, so that their gradients are sums of the ranks'.

    As parts of which each rank has all, whatever their size will be.
    """
    expected = whole.outcome.gradients
    scale = _scale(whole.outcome)
    everything = Part(0, (1,), (len(ranks),), repeated=True)
    found: dict[tuple[str, int], Part] = {}
    for place, number in enumerate(whole.call.numbers):
        if place not in expected or not whole.call.tensors[place].dim():
            continue
        own = [rank.gradients[place] for rank in ranks]
        alike = all(_same(one, expected[place], scale) for one in own)
        if not alike and _same(_sum(own), expected[place], scale):
            found["", number] = everything
    return found


def _scale(expected: Outcome) -> float:
    return max((largest(numbers) for whole in expected.gradients.values() for numbers in whole), default=0.0)


def _partial(whole: Whole, rank: Outcome, tp_size: int) -> Iterator[dict[tuple[str, int], Part]]:
    """Ways in which results beside the first may be parts: by one dimension; by heads of each sample."""
    unlike = {n: result.shape for n, result in whole.outcome.results.items() if rank.results[n].shape != result.shape}
    plain: dict[tuple[str, int], Part] = {}
    for number, shape in unlike.items():
        own = rank.results[number].shape
        dims = [dim for dim in range(len(shape)) if len(own) == len(shape) and own[dim] != shape[dim]]
        if number == min(whole.outcome.results) or len(dims) != 1 or own[dims[0]] * tp_size != shape[dims[0]]:
            return
        plain["", number] = Part(dims[0], (shape[dims[0]],))
    yield plain
    samples = whole.call.tensors[0].shape[0] if whole.call.tensors and whole.call.tensors[0].dim() else 1
    if any(part.dim == 0 and part.widths[0] % samples == 0 for part in plain.values()):
        yield {
            place: Part(0, (part.widths[0] // samples,), repeated=True) if part.dim == 0 else part
            for place, part in plain.items()
        }


def _leaves_alike(rank: Outcome, expected: Outcome) -> bool:
    """Whether what is left on modules is the whole block's; a state may be a part, a loss has one number anyway."""
    return all(
        key in rank.left and (rank.left[key].shape != x.shape or close(rank.left[key], x))
        for key, x in expected.left.items()
    )


def _agreement(whole: Whole, division: Division, ranks: list[Outcome] | None) -> Agreement | None:
    expected = whole.outcome
    if ranks is None or not all(
        close(rank.results[number], result) for rank in ranks for number, result in expected.results.items()
    ):
        return None
    if not all(_leaves_alike(rank, expected) for rank in ranks):
        return None
    summed = summed_gradients(expected, ranks, division.parts, division.first_only)
    return None if summed is None else Agreement(division, summed)


def summed_gradients(
    expected: Outcome, ranks: list[Outcome], parts: Mapping[str, Part], first_only: frozenset[str] = frozenset()
) -> frozenset[str] | None:
    """The whole parameters whose gradients are sums of the ranks'; None if any gradient is not the whole block's.

    Args:
        expected: of the whole block.
        ranks: what each of them has.
        parts: of the parameters that are divided, by name.
        first_only: parameters of which only the first rank's gradient counts.
    """
    scale = _scale(expected)
    summed = set()
    for name, whole in expected.gradients.items():
        found = [rank.gradients[name] for rank in ranks]
        if isinstance(name, str) and name in parts:
            dim = parts[name].dim
            own = [gradient[dim] for gradient in found]
            if not close(_together(own, parts[name], whole[dim]), whole[dim], scale):
                return None
        elif isinstance(name, str) and name in first_only:
            if not _same(found[0], whole, scale):
                return None
        elif not all(_same(gradient, whole, scale) for gradient in found):
            if not isinstance(name, str) or not _same(_sum(found), whole, scale):
                return None
            summed.add(name)
    return frozenset(summed)


def _same(found: Sketch, expected: Sketch, scale: float) -> bool:
    return all(close(one, other, scale) for one, other in zip(found, expected, strict=True))


def _sum(found: list[Sketch]) -> Sketch:
    return tuple(torch.stack(numbers).sum(0) for numbers in zip(*found, strict=True))


def _together(found: list[Tensor], part: Part, like: Tensor) -> Tensor:
    total = torch.zeros_like(like)
    for rank, numbers in enumerate(found):
        total.index_add_(0, part.index(rank, len(found), len(like)), numbers)
    return total
