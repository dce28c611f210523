"""Gradients of which several ranks of one replica hold a summand each."""

from collections.abc import Collection, Iterator, Sequence
from itertools import groupby
from typing import NamedTuple

import torch
from torch import Tensor

from hybridpp.cluster import Group


class Summand(NamedTuple):
    """This rank's summand of a gradient.

    Attributes:
        name: the parameter's.
        group: the ranks whose summands make up the gradient.
        view: the gradient, or the part of it that these ranks share.
    """

    name: str
    group: Group
    view: Tensor


class ReachedFlags:
    """Which parameters a backward pass has reached on any of several ranks.

    Args:
        names: of the parameters.
        flags: for each of these not 0 if it was reached; on the device until the host reads it.

    Attributes:
        names, flags: as given.
    """

    def __init__(self, names: Sequence[str], flags: Tensor):
        self.names, self.flags = names, flags
        self._reached: frozenset[str] | None = None

    def take(self, flags: Sequence[float]) -> None:
        """Take over what the host has read of :attr:`flags`."""
        self._reached = frozenset(name for name, flag in zip(self.names, flags, strict=True) if flag)

    def read(self) -> frozenset[str]:
        """The parameters that were reached. The host waits for the device, unless it has read the flags already."""
        if self._reached is None:
            self.take(self.flags.tolist())
        assert self._reached is not None, "it was just set"
        return self._reached


class SharedGradients:
    """Sums the gradients of parameters that stages share, or that ranks apply to different shards of an activation.

    Args:
        coalesced_group: a group whose members hold the same parameters: all its sums go in one message.

    Attributes:
        summands: of this rank, in the same order on all ranks.
    """

    def __init__(self, coalesced_group: Group | None):
        self.summands: list[Summand] = []
        self._coalesced_group = coalesced_group

    def sum(self, reached: Collection[str]) -> ReachedFlags:
        """All-reduce every summand over its group. Collective: all ranks of each group.

        Args:
            reached: the parameters that a backward pass has reached on this rank.

        Returns:
            Which of the summands' parameters one has reached on any of these ranks.
        """
        names = list(dict.fromkeys(one.name for one in self.summands))
        index = {name: number for number, name in enumerate(names)}
        flags = torch.tensor([float(name in reached) for name in names])
        if self.summands:
            flags = flags.to(self.summands[0].view.device, non_blocking=True)
        for group, shared in self._messages():
            own = list(dict.fromkeys(index[one.name] for one in shared))
            where = slice(own[0], own[-1] + 1) if len(own) == own[-1] - own[0] + 1 else own
            flags[where] = _sum([one.view for one in shared], flags[where], group)
        return ReachedFlags(names, flags)

    def keep_one_copy(self) -> None:
        """Clear the sums on all ranks but one, so that the next reduction counts them once."""
        for _, group, view in self.summands:
            if group.rank != 0:
                view.zero_()

    def _messages(self) -> Iterator[tuple[Group, list[Summand]]]:
        """The summands of each message, in order; a parameter's sums over several groups are consecutive."""
        for (group, _), shared in groupby(self.summands, lambda one: (one.group, one.view.dtype)):
            together = list(shared)
            for one in [together] if group is self._coalesced_group else [[one] for one in together]:
                yield group, one


def _sum(views: list[Tensor], flags: Tensor, group: Group) -> Tensor:
    """Sum ``views``, in place, and ``flags``, which it returns."""
    if len(views) == 1 and views[0].is_contiguous():
        # No copy of it: an embedding may be the largest tensor of all.
        flags = flags.clone()
        for work in [group.all_reduce(one) for one in (views[0], flags)]:
            work.wait()
        return flags
    total = torch.cat([*(view.reshape(-1) for view in views), flags.to(views[0].dtype)])
    group.all_reduce(total).wait()
    *parts, flags = torch.split(total, [*(view.numel() for view in views), len(flags)])
    for view, part in zip(views, parts, strict=True):
        view.copy_(part.view(view.shape))
    return flags.real
