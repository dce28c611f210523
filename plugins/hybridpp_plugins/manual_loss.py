"""Weights of the replicas' losses in ``booster.backward``, by what these are means over."""

import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from hybridpp.cluster import Group, get_dist_logger
from hybridpp.errors import ConfigError, UnlikeCallsError
from hybridpp.nn import walk
from hybridpp.nn.torch_private import DisableTorchFunctionSubclass, is_functorch_active
from hybridpp.partition.compiled import is_compiled_by_script
from hybridpp.pipeline import GraphLoss, LossTrace, read_loss, weigh
from hybridpp.pipeline.batch_statistics import StatisticsWatch
from hybridpp.pipeline.loss_coupling import LossSection, mark_outputs, num_samples_of
from hybridpp.pipeline.loss_form import ADVICE
from hybridpp.pipeline.loss_graph import GraphTerm, Site
from hybridpp.pipeline.loss_sums import SumSearch
from hybridpp_plugins.manual_forward import end_of, tensors_of

_DECLARED, _NOTHING = 1 << 25, 1 << 26
# Of more terms a graph does not tell whether they are of tasks, or of samples one by one, which cannot be matched.
_MAX_TERMS = 6
# The first calls of a model that are watched, and the ways to make a loss that are looked at.
_MAX_WATCHED, _MAX_LOOKED_AT = 4, 16
# What a replica tells of its call before its numbers.
_IS_SYNCING, _KIND, _IS_COUPLED, _MAY_BE_LIMIT, _NUM_FACTS = 0, 1, 2, 3, 4
_NUM_ITEMS = (
    "pass booster.backward(loss, optimizer, num_items=...), what each replica's loss counts by (num_items=1 on all "
    "of them is the plain mean). See docs/losses.md."
)
_COUPLED = (
    "the loss that booster.backward gets puts samples together ({why}), as negatives of a contrastive loss, statistics "
    "of a batch and a balance of experts do. Each replica's is made of its own samples, so their mean is not the loss "
    "of the whole batch. Compute it with booster.execute_pipeline and a criterion with coupled = True, which gets the "
    "outputs of all replicas; or, if each replica's own samples are meant, or samples that belong together, "
) + _NUM_ITEMS
_UNLIKE = (
    "the losses that booster.backward gets are made in different ways on the replicas (of other terms, or outputs of "
    "the model), so the parts of the whole batch's loss cannot be weighted: "
    + ADVICE
    + ". A replica that has nothing to "
    "learn may pass a loss times 0. Or, if they are meant to differ, " + _NUM_ITEMS
)
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
    "mean over, on all ranks; num_items=1 on all of them says that the plain mean is right. Multiply a sum that shall "
    "add up over the replicas with their number. See docs/losses.md."
)


_STATISTICS = (
    "the model applies a statistic of all samples of a replica's batch to each of them ({why}), as batch normalisation "
    "does, so results depend on the number of replicas. If they must not, let the statistic be of each sample, or "
    "average it over plugin.dp_group. num_items, given to booster.backward on all replicas, disables this warning."
)


_LIMIT = (
    "on some replicas, the loss that booster.backward gets has a sum that is divided by 1: it is taken for one item. "
    "If the batch has none there, and 1 is a lower limit (max(n, 1)), the sum counts for too much. Divide by the mean "
    "of n over the replicas (torch.distributed.all_reduce over plugin.dp_group), and pass num_items=1 on all ranks. "
    "See docs/losses.md."
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
        self._kinds, self._sizes, self._has_nothing = 0, 0, False
        self._has_warned = False
        self._num_watched, self._statistics, self._has_warned_of_statistics = 0, "", False
        self._looked_at: set[int] = set()
        self._searches: dict[int, SumSearch] = {}

    def around(self, inner: Callable[..., Any], model: nn.Module) -> Callable[..., Any]:
        """A wrapper of the script's own calls of the model, whose outputs are marked; ``inner`` wraps them inside."""

        def run(forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            if not torch.is_grad_enabled() or is_functorch_active():
                return inner(forward, args, kwargs)
            given = tensors_of((args, kwargs))
            num_samples, trace, watch = num_samples_of(given), None, None
            if num_samples and self._num_watched < _MAX_WATCHED:
                self._num_watched += 1
                # A compiler that the script has called would trace what watches.
                if not any(map(is_compiled_by_script, walk.modules(model))):
                    inputs = {"args": args, "kwargs": kwargs}
                    trace = LossTrace([inputs], num_samples)
                    watch = StatisticsWatch([inputs], num_samples, 0, (), is_last=True)
            shapes = [tuple(tensor.shape) for tensor in given]
            with watch or nullcontext(), trace or nullcontext():
                outputs = inner(forward, args, kwargs)
            if watch is not None:
                self._statistics = self._statistics or watch.found or watch.read
            with DisableTorchFunctionSubclass():
                mark_outputs(list(map(end_of, tensors_of(outputs))), num_samples, trace, shapes)
            return outputs

        return run

    @contextmanager
    def weighed(self, loss: Tensor, num_items: Any, *, is_syncing: bool) -> Iterator[None]:
        """A context for the backward pass of a loss.

        Collective: all replicas; one all-gather of some numbers, for which the host does not wait, but for losses that
        are made in a new way.

        Args:
            loss: scalar, with a graph.
            num_items: that the loss is a mean over, as the script says; None: what is found.
            is_syncing: whether the pass reduces gradients.

        Raises:
            UnlikeCallsError: replicas are in different calls; noticed if the device is the host.
            ConfigError: ``num_items`` is no number; or the loss puts samples together; or replicas' losses are made in
                different ways, which is noticed later if the device is not the host.
        """
        why, is_new = "", False
        if num_items is not None:
            sites = [] if loss.grad_fn is None else [Site(loss.grad_fn)]
            learned: list[tuple[int, Site]] = []
            counts, kind, size = [_checked(num_items)], _DECLARED, 0
        else:
            found, section = read_loss(loss, _MAX_TERMS), LossSection(loss)
            sites, counts = [term.site for term in found.terms], [term.num_items for term in found.terms]
            learned = [(at, Site(term.node)) for at, term in enumerate(found.terms) if term.product is not None]
            kind, size = _kind(found, section), found.size
            counts = counts[:1] if found.is_one else counts
            is_new = section.signature not in self._looked_at and len(self._looked_at) < _MAX_LOOKED_AT
            if is_new:
                self._looked_at.add(section.signature)
                why = section.coupling(loss, is_of_one_item=_is_of_one_item(found))
                self._searches[section.signature] = SumSearch()
            if loss.grad_fn is not None and not found.is_nothing and all(term.is_sum for term in found.terms):
                how = "a sum that is divided by nothing" if found.terms else f"it ends with {loss.grad_fn.name()}"
                self._warn_once(_UNKNOWN.format(why=found.why or how))
            search = self._searches.get(section.signature)
            if not self._has_warned and search is not None and not search.is_done and not why:
                how = search.look(found, section)
                if how:
                    self._warn_once(_UNKNOWN.format(why=how))
        self._note(kind, size)
        may_be_limit = num_items is None and any(map(_may_be_limit, found.terms))
        facts = [float(is_syncing), float(kind), float(bool(why)), float(may_be_limit)]
        weights = self._weights(facts, counts, is_new=is_new, why=why)
        if self._statistics and num_items is None and not self._has_warned_of_statistics:
            self._has_warned_of_statistics = True
            _warn(_STATISTICS.format(why=self._statistics))
        if len(counts) < len(sites):
            sites = list(dict.fromkeys(sites))
            weights = weights[:1].expand(len(sites))
        handles = [weigh(site, weight) for site, weight in zip(sites, weights, strict=False)]
        # Below a product, a division by no items would make NaN of a gradient of 0.
        counted = (weights != 0).to(weights.dtype) if learned else weights
        handles += [weigh(site, counted[min(at, len(counted) - 1)]) for at, site in learned]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _note(self, kind: int, size: int) -> None:
        self._has_nothing |= kind in (0, _NOTHING)
        if kind not in (0, _NOTHING):
            self._kinds = zlib.crc32(repr(kind).encode(), self._kinds)
        if size:
            self._sizes = zlib.crc32(repr(size).encode(), self._sizes)

    def _weights(self, facts: list[float], counts: list[Any], *, is_new: bool, why: str) -> Tensor:
        """By count: this replica's over the mean of all; ones, where these are not known."""
        row = [*facts, *counts, *[0.0] * (_MAX_TERMS - len(counts))]
        if any(isinstance(one, Tensor) for one in row):
            own = torch.stack([torch.as_tensor(one, dtype=torch.float64).to(self._device).reshape(()) for one in row])
        else:
            own = torch.tensor(row, dtype=torch.float64).to(self._device)
        rows = torch.stack(list(self._group.all_gather(own)))
        if rows.is_cpu or is_new:
            _check(rows[:, :_NUM_FACTS].tolist(), why)
            if len({bool(one) for one in rows[:, _MAY_BE_LIMIT].tolist()}) > 1:
                self._warn_once(_LIMIT)
        total, kinds = rows[:, _NUM_FACTS:].sum(0), rows[:, _KIND]
        # A replica whose loss is nothing is like any other.
        kind = torch.where(kinds == _NOTHING, 0, kinds).amax()
        is_alike = ((kinds == kind) | (kinds == _NOTHING)).all() & (kind > 0) & (total > 0)
        # Exactly 1 for equal counts.
        return torch.where(is_alike, own[_NUM_FACTS:] * len(rows) / total, torch.ones_like(total))

    def digest(self) -> float:
        """Of what is not exchanged of the losses since it was asked for last: how they are made, and unknown sizes."""
        kinds = 0 if self._has_nothing else 1 + (self._kinds & 0xFFFFFF)
        digest = float(kinds << 24 | self._sizes & 0xFFFFFF)
        self._kinds, self._sizes, self._has_nothing = 0, 0, False
        return digest

    def heard(self, digests: Iterable[float]) -> None:
        """What all ranks have said of their losses.

        Raises:
            ConfigError: they are made in different ways.
        """
        kinds, sizes = zip(*(divmod(int(one), 1 << 24) for one in digests), strict=True)
        if len({one for one in kinds if one}) > 1:
            raise ConfigError(_UNLIKE)
        if len(set(sizes)) > 1:
            self._warn_once(_WARNING)

    def _warn_once(self, text: str) -> None:
        if not self._has_warned:
            self._has_warned = True
            _warn(text)


def _kind(found: GraphLoss, section: LossSection) -> int:
    """Equal for losses that are made in the same way, of the same outputs; 0: that is not known."""
    if found.is_nothing or not found.kind:
        return _NOTHING if found.is_nothing else 0
    return 1 + (zlib.crc32(repr((found.kind, section.positions)).encode()) & 0xFFFFFF)


def _is_of_one_item(found: GraphLoss) -> bool | None:
    if not found.terms or any(term.is_sum for term in found.terms):
        return None
    return all(float(term.num_items) <= 1 for term in found.terms)


def _check(facts: Sequence[Sequence[float]], why: str) -> None:
    """What replicas tell of their calls must be alike."""
    if len({row[_IS_SYNCING] for row in facts}) > 1:
        raise UnlikeCallsError(
            "all replicas must call booster.backward as often inside no_sync, where each tells the others its "
            "number of items: some are inside of it, and others are not. Call it as often on all of them."
        )
    # What is not known of one replica is warned of.
    if len({row[_KIND] for row in facts} - {0.0, _NOTHING}) > 1:
        raise ConfigError(_UNLIKE)
    if any(row[_IS_COUPLED] for row in facts):
        raise ConfigError(_COUPLED.format(why=why or "on another replica"))


def _may_be_limit(term: GraphTerm) -> bool:
    """Whether a sum is divided by 1, which a script may have put in the place of no items."""
    divisors = [value for value, power in term.factors or () if power == 1]
    return any(float(one) == 1.0 for one in divisors if not isinstance(one, Tensor) or one.is_cpu)


def _checked(num_items: Any) -> Any:
    if isinstance(num_items, Tensor) and num_items.numel() == 1:
        return num_items.detach()
    if isinstance(num_items, int | float) and num_items >= 0:
        return float(num_items)
    raise ConfigError(
        f"num_items is the number of items that a loss is a mean over: got {num_items!r:.80}. Pass a number, or a "
        "tensor of one element."
    )
