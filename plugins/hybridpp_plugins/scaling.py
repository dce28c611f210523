"""The loss scale of one optimizer: which steps it skips, and what is told about them."""

import logging
import math

from hybridpp.checkpoint import gather_objects
from hybridpp.cluster import get_dist_logger
from hybridpp.config import LossScaleConfig
from hybridpp.data_parallel import GradientBuckets
from hybridpp.precision import LossScale, after_step
from hybridpp_plugins.agreed_norm import AgreedNorm


class Scaling:
    """Decides at every fp16 step whether it is skipped, and says so; in the other precisions the scale is 1.

    Attributes:
        state: the scale, and what led to it.
        skipped_steps: how many were.
        last_step_skipped: whether the last one was.
        report: where the last overflow came from, as far as it was looked for; "" before one.
    """

    def __init__(self, config: LossScaleConfig, active: bool, norm: AgreedNorm, buckets: GradientBuckets):
        self.state = LossScale(config.initial_scale if active else 1.0)
        self.skipped_steps = 0
        self.last_step_skipped = False
        self.report = ""
        self._config = config
        self._active = active
        self._norm = norm
        self._buckets = buckets
        self._searched = False
        self._num_passes = 0
        self._num_by_hand = 0
        self._obstacle = ""

    def begin(self, by_hand: bool) -> None:
        """Before backward passes; ``by_hand``: the script runs them, so that they cannot be run again."""
        if self._buckets.is_consumed:
            self.forget()
        self._num_passes += 1
        self._num_by_hand += by_hand

    def forget(self) -> None:
        """The gradients were given up."""
        self._searched, self._num_passes, self._num_by_hand, self._obstacle = False, 0, 0, ""

    def is_overflow(self, norm: float | None) -> bool:
        """Whether a step with gradients of that norm is skipped."""
        return self._active and norm is not None and not math.isfinite(norm)

    def wants_search(self, norm: float | None) -> bool:
        """Whether the step is known to be skipped, and that will be told; the same on every rank."""
        return self.is_overflow(norm) and self._will_warn and not self._searched

    @property
    def may_search(self) -> bool:
        """Whether an overflow in the step that begins will be told."""
        return self._active and self._will_warn

    @property
    def is_by_hand(self) -> bool:
        """Whether the script ran backward passes of the gradients that are held."""
        return self._num_by_hand > 0

    def not_found(self, reason: str) -> None:
        """Take down why it is not known where an overflow came from."""
        self._obstacle = reason

    def found(self, text: str, by_hand: bool = False) -> None:
        """Take down where an overflow came from; ``by_hand``: of all calls by the script, else of the last call."""
        if by_hand and (num_others := self._num_passes - self._num_by_hand):
            calls = f"{num_others} call{'s' if num_others > 1 else ''}"
            text = f"{text} (not looked for in {calls} of execute_pipeline that add up with these)"
        elif not by_hand and self._num_passes > 1:
            text = f"{text} (looked for in the last of {self._num_passes} calls whose gradients add up)"
        self.report, self._searched = text, True

    def step(self, norm: float) -> bool:
        """The end of a step: whether to skip it. Collective: all ranks, with the same norm."""
        before, overflow = self.state, self.is_overflow(norm)
        if self._active:
            self.state = after_step(before, overflow, self._config)
        self.last_step_skipped = overflow
        if overflow:
            self._tell_skipped(before.scale)
            self.skipped_steps += 1
        elif not before.settled and self.skipped_steps:
            get_dist_logger().warning(
                f"the loss scale was found: {before.scale:g}, after {self.skipped_steps} skipped steps. Pass "
                f"initial_scale={before.scale:g} to keep them.",
                ranks=[0],
            )
        self.forget()
        return overflow

    @property
    def _will_warn(self) -> bool:
        """Whether the next skipped step is told: the first one, and then ever more rarely: 10, 100, …"""
        return math.log10(self.skipped_steps + 1).is_integer()

    def _tell_skipped(self, scale: float) -> None:
        if not self._searched:
            self.report = f"{self._not_finite()}; {self._why_not_searched()}"
        floor = scale == self._config.min_scale
        get_dist_logger().log(
            logging.WARNING if self._will_warn else logging.DEBUG,
            f"a gradient overflowed in fp16: step skipped, loss scale {scale:g} -> {self.state.scale:g}"
            f"{', the least that min_scale allows' if floor else ''} "
            f"({self.skipped_steps + 1} steps so far, see optimizer.skipped_steps). "
            f"The first inf or NaN: {self.report}",
            ranks=[0],
        )

    def _not_finite(self) -> str:
        """In words, the same on every rank."""
        rows = gather_objects(self._norm.control, self._norm.not_finite(self._buckets.gradients))
        rank, names = next(((rank, names) for rank, names in enumerate(rows) if names), (0, ["none"]))
        # Backward meets the last ones first.
        more = f" and of {len(names) - 1} before it" if len(names) > 1 else ""
        return f"in the gradient of {names[-1]!r}{more} on rank {rank}"

    def _why_not_searched(self) -> str:
        if not self._will_warn:
            return "no more was looked for: that is done at the 1st, 10th, 100th, … skipped step"
        if self._obstacle:
            return f"no more is known, because {self._obstacle}"
        return "no more was looked for: its gradients changed behind the backward pass"
