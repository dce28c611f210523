"""The gradients accumulated since the last step: their scale, their norm, clipping."""

import math
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext

from torch import Tensor
from torch.optim import Optimizer

from hybridpp.cluster import Group, gather_numbers
from hybridpp.data_parallel import GradientReducer, UpdateTarget
from hybridpp.errors import ConfigError
from hybridpp.optim import GlobalGradNorm, can_divide, divided_in_kernel
from hybridpp_plugins.manual_clipping import ManualClippingDetector, ManualScaling

_IN_OPTIMIZER = "in the optimizer's step, get_grad_norm or clip_grad_by_norm"


class AccumulatedGradients:
    """The gradients that ``step`` will use.

    Args:
        reducer: holds the gradients.
        norm: computes their norm over all ranks.
        in_kernel: whether a fused optimizer may scale them.

    Attributes:
        scale: the factor that the gradients contain.
        cached_norm: their norm without the scale, the same on every rank; None: it is not known.
        round: number of the accumulation; a new one begins when gradients start from zero.
        num_passes: backward passes in this round.
        num_manual_passes: those of them that the script ran itself.
        clip_detector: detects clipping by the script; None where clipping is impossible or harmless: the gradients are
            not exposed, or the model is on one rank.
    """

    def __init__(self, reducer: GradientReducer, norm: GlobalGradNorm, in_kernel: bool = True):
        self.scale = 1.0
        self.cached_norm: float | None = None
        self.round = self.num_passes = self.num_manual_passes = 0
        is_split = len(norm.ranks) > 1
        self.clip_detector = ManualClippingDetector(reducer) if reducer.exposes_grad and is_split else None
        self._reducer = reducer
        self._norm = norm
        self._in_kernel = in_kernel
        self._is_unscaled = False
        # The version of the gradients that the cached norm belongs to.
        self._version: tuple[int, ...] = ()

    def begin(self, loss_scale: float, manual: bool) -> None:
        """Prepare for backward passes of a loss times ``loss_scale``; ``manual``: the script runs them."""
        if self._reducer.is_consumed:
            self.start_round()
        else:
            if self.clip_detector is not None:
                self.clip_detector.detect()
            if self._is_unscaled:
                self._reducer.scale(loss_scale)
        self.num_passes += 1
        self.num_manual_passes += manual
        self.scale, self.cached_norm, self._is_unscaled = loss_scale, None, False
        self._reducer.begin()

    def end(self) -> None:
        """Reduce the gradients after the backward passes. Collective: all replicas, unless inside ``no_sync``."""
        self._reducer.finish_grad_sync()
        self._record_for_detector()

    def _record_for_detector(self) -> None:
        """Note a change of the gradients by the library, so that it does not count as the script's."""
        if self.clip_detector is not None:
            self.clip_detector.record()

    def start_round(self) -> None:
        """Start a new round: the gradients so far are used, refused or cleared."""
        self.round += 1
        self.num_passes = self.num_manual_passes = 0

    def clear(self, set_to_none: bool) -> None:
        """Drop the gradients; exposed ``parameter.grad`` become None, or zeros unless ``set_to_none``."""
        self._reducer.zero(set_to_none)
        self.start_round()
        self.cached_norm, self._is_unscaled = None, False

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Copies of the gradients without the scale, by name. Collective, if gradients are not reduced yet."""
        self.finalize()
        unused = set(self._reducer.unused_parameters())
        held = [(name, gradient) for name, gradient in self._reducer.whole_gradients().items() if name not in unused]
        return ((name, gradient / self.scale) for name, gradient in held)

    def finalize(self) -> None:
        """Complete the gradients for ``step``: take over what the script set, and reduce."""
        self._reducer.sync_from_grad()
        self._reducer.finish_grad_sync()
        if self.clip_detector is not None:
            self.clip_detector.detect()

    def finalize_for(self, caller: str) -> None:
        """:meth:`finalize` for the method ``caller``, which needs reduced gradients.

        Raises:
            ConfigError: it is called inside ``no_sync``.
        """
        if not self._reducer.is_syncing and not self._reducer.is_consumed:
            raise ConfigError(
                f"{caller} inside no_sync would use one replica's gradients only. Call it after the block."
            )
        self.finalize()

    def norm(self) -> float:
        """The norm of the complete model's current gradient, without the scale. Collective: all ranks.

        It is computed again if the script has written to gradients since it was cached.
        """
        if self.cached_norm is None or self._changed_anywhere():
            return self.set_norm(self._norm.gather(f"{_IN_OPTIMIZER} (norm of the gradients)", self._reducer.gradients))
        return self.cached_norm

    def set_norm(self, messages: Sequence[Sequence[float]]) -> float:
        """Compute the norm from every rank's message, by rank."""
        return self._cache_norm(self._norm.total(messages) / self.scale)

    def _cache_norm(self, value: float) -> float:
        self.cached_norm, self._version = value, self._reducer.version
        return value

    def _changed_anywhere(self) -> bool:
        """Whether the script has written to gradients since the norm was cached, on any rank, without a device wait."""
        if not self._reducer.exposes_grad or self._reducer.is_consumed:
            return False
        has_changed = float(self._version != self._reducer.version)
        rows = gather_numbers(self.control, f"{_IN_OPTIMIZER} (changes of gradients)", [has_changed])
        return any(has_changed for (has_changed,) in rows)

    @property
    def control(self) -> Group:
        """All ranks of the world."""
        return self._norm.control

    def nonfinite(self) -> list[str]:
        """This rank's parameters whose gradients are inf or NaN. Waits for the device."""
        return self._norm.not_finite(self._reducer.gradients)

    def unscale(self) -> None:
        """Divide the gradients by the scale."""
        if self.scale != 1.0:
            self._reducer.scale(1.0 / self.scale)
            self.scale, self._is_unscaled = 1.0, True

    def clip_by_norm(self, max_norm: float) -> float:
        """Scale the gradients to a norm of at most ``max_norm``, unless it is inf or NaN; returns the norm before."""
        norm = self.norm()
        if math.isfinite(norm):
            factor = clip_factor(norm, max_norm)
            self._reducer.scale(factor)
            self._cache_norm(norm * factor)
            self._record_for_detector()
        return norm

    def clip_by_value(self, limit: float) -> None:
        """Bring every element into ``[-limit, limit]``."""
        self._reducer.clamp(limit * self.scale)
        self.cached_norm = None
        self._record_for_detector()

    def used(self, factor: float, optimizer: Optimizer, target: UpdateTarget) -> AbstractContextManager[None]:
        """A context for a step, in or before which gradients are divided by the scale and multiplied by ``factor``.

        Args:
            factor: above 0.
            optimizer: if it is fused, its kernels divide while they read, which saves a pass over all gradients.
            target: what it updates, which holds its gradients.
        """
        scale, self.scale, self._is_unscaled = self.scale, 1.0, False
        is_fused = all(group.get("fused") for group in optimizer.param_groups)
        in_kernel = self._in_kernel and is_fused and not target.copies_gradients
        if in_kernel and factor != scale and can_divide(optimizer, target.tensors.values()):
            return divided_in_kernel(optimizer, scale / factor)
        self._reducer.scale(factor / scale)
        return nullcontext()

    def check_clipping(self) -> None:
        """Exchange and check what :attr:`clip_detector` found. Collective: all ranks, one all-gather."""
        if self.clip_detector is not None:
            rows = gather_numbers(
                self.control, "in the optimizer's step, after booster.backward", self.clip_detector.report()
            )
            self.clip_detector.check([ManualScaling(*row) for row in rows])


def clip_factor(norm: float, max_norm: float) -> float:
    """The factor that clips gradients of this norm."""
    # With the same small term as in torch.nn.utils.clip_grad_norm_, so that the results are equal.
    return min(1.0, max_norm / (norm + 1e-6)) if max_norm > 0 else 1.0
