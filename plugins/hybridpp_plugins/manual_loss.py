"""Weights of the replicas' losses in ``booster.backward``, by what these are means over."""

import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from hybridpp.cluster import Group, get_dist_logger
from hybridpp.errors import ConfigError, UnlikeCallsError
from hybridpp.pipeline import GraphLoss, read_loss, weigh

_DECLARED = 1 << 25
# Of more terms a graph does not tell whether they are of tasks, or of samples one by one, which cannot be matched.
_MAX_TERMS = 6
_WARNING = (
    "the losses that booster.backward gets on the replicas are of batches of unlike sizes, and what they are means "
    "over cannot be found (or they are made in different ways): the gradient is the plain mean of the replicas' "
    "losses, which is not that of the whole batch. Pass booster.backward(loss, optimizer, num_items=...), the number "
    "of items that the loss is a mean over, on all ranks. See docs/losses.md."
)
_UNKNOWN = (
    "what the loss that booster.backward gets is a mean over cannot be read from its graph ({why}): the gradient is "
    "the plain mean of the replicas' losses. That is the one of the whole batch only if each replica's loss is a mean "
    "over as many items. Pass booster.backward(loss, optimizer, num_items=...), the number of items that the loss is a "
    "mean over, on all ranks; num_items=1 on all of them says that the plain mean is right. See docs/losses.md."
)


def _warn(text: str) -> None:
    get_dist_logger().warning(text, ranks=[0])


class ManualLosses:
    """The losses that scripts compute themselves, by calling the model.

    Each replica's loss counts by its number of items, so that the gradient is that of the loss of the whole batch.

    Args:
        group: the replicas; more than one.
        device: where the rank computes.
    """

    def __init__(self, group: Group, device: torch.device):
        self._group, self._device = group, device
        self._digest = 0
        self._has_warned = False

    @contextmanager
    def weighed(self, loss: Tensor, num_items: Any, *, is_syncing: bool) -> Iterator[None]:
        """A context for the backward pass of a loss.

        Collective: all replicas; one all-gather of some numbers, for which the host does not wait.

        Args:
            loss: scalar, with a graph.
            num_items: that the loss is a mean over, as the script says; None: what is found.
            is_syncing: whether the pass reduces gradients.

        Raises:
            UnlikeCallsError: replicas are in different calls; noticed if the device is the host.
            ConfigError: ``num_items`` is no number.
        """
        found = GraphLoss() if num_items is not None else read_loss(loss, _MAX_TERMS)
        if num_items is not None:
            nodes, counts, kind = [loss.grad_fn], [_checked(num_items)], _DECLARED
        else:
            nodes, counts = [term.node for term in found.terms], [term.num_items for term in found.terms]
            kind = found.kind
        if num_items is None and loss.grad_fn is not None and all(term.is_sum for term in found.terms):
            why = "a sum that is divided by nothing" if found.terms else f"it ends with {loss.grad_fn.name()}"
            self._warn_once(_UNKNOWN.format(why=why))
        if kind or found.size:
            self._digest = zlib.crc32(repr((kind, found.size)).encode(), self._digest)
        weights = self._weights(float(kind), counts, is_syncing)
        handles = [weigh(node, weight) for node, weight in zip(nodes, weights, strict=False) if node is not None]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _weights(self, kind: float, counts: list[Any], is_syncing: bool) -> Tensor:
        """By count: this replica's over the mean of all; ones, where replicas' losses are unlike."""
        row = [float(is_syncing), kind, *counts, *[0.0] * (_MAX_TERMS - len(counts))]
        if any(isinstance(one, Tensor) for one in row):
            own = torch.stack([torch.as_tensor(one, dtype=torch.float64).to(self._device).reshape(()) for one in row])
        else:
            own = torch.tensor(row, dtype=torch.float64).to(self._device)
        rows = torch.stack(list(self._group.all_gather(own)))
        if rows.is_cpu and bool((rows[:, 0] != rows[0, 0]).any()):
            raise UnlikeCallsError(
                "all replicas must call booster.backward as often inside no_sync, where each tells the others its "
                "number of items: some are inside of it, and others are not. Call it as often on all of them."
            )
        total = rows[:, 2:].sum(0)
        is_alike = (rows[:, 1] == rows[0, 1]).all() & (total > 0)
        # Exactly 1 for equal counts.
        return torch.where(is_alike, own[2:] * len(rows) / total, torch.ones_like(total))

    def digest(self) -> float:
        """Of what is not exchanged of the losses since it was asked for last: how they are made, and unknown sizes."""
        digest, self._digest = self._digest, 0
        return float(digest)

    def heard(self, digests: Any) -> None:
        """Warn, once, if those of all ranks differ."""
        if len(set(digests)) > 1:
            self._warn_once(_WARNING)

    def _warn_once(self, text: str) -> None:
        if not self._has_warned:
            self._has_warned = True
            _warn(text)


def _checked(num_items: Any) -> Any:
    if isinstance(num_items, Tensor) and num_items.numel() == 1:
        return num_items.detach()
    if isinstance(num_items, int | float) and num_items >= 0:
        return float(num_items)
    raise ConfigError(
        f"num_items is the number of items that a loss is a mean over: got {num_items!r:.80}. Pass a number, or a "
        "tensor of one element."
    )
