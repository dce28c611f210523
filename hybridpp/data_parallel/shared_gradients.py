"""Gradients of which several ranks of one replica hold a summand each."""

from collections.abc import Iterator
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

    def sum(self) -> None:
        """All-reduce every summand over its group. Collective: all ranks of each group."""
        for group, views in self._messages():
            _sum(views, group)

    def keep_one_copy(self) -> None:
        """Clear the sums on all ranks but one, so that the next reduction counts them once."""
        for _, group, view in self.summands:
            if group.rank != 0:
                view.zero_()

    def _messages(self) -> Iterator[tuple[Group, list[Tensor]]]:
        """The tensors of each message, in order; a parameter's sums over several groups are consecutive."""
        for (group, _), shared in groupby(self.summands, lambda one: (one.group, one.view.dtype)):
            views = [one.view for one in shared]
            for together in [views] if group is self._coalesced_group else [[view] for view in views]:
                yield group, together


def _sum(views: list[Tensor], group: Group) -> None:
    if len(views) == 1 and views[0].is_contiguous():
        group.all_reduce(views[0]).wait()
        return
    total = torch.cat([view.reshape(-1) for view in views])
    group.all_reduce(total).wait()
    for view, part in zip(views, torch.split(total, [view.numel() for view in views]), strict=True):
        view.copy_(part.view(view.shape))
