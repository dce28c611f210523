"""Steps whose gradients are not finite: skip or refuse them, and report where the first inf or NaN came from.

A step with finite gradients never gets here.
"""

import logging
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NoReturn, Protocol

from hybridpp.cluster import Group, gather_objects, get_dist_logger
from hybridpp.config import OptimizerConfig
from hybridpp.errors import NonFiniteGradientError
from hybridpp.precision import LossScaler
from hybridpp_plugins.manual_forward import NotRepeatable

_NAMES_PARAMETERS = "in a step of the optimizer with an inf or NaN gradient"


class AccumulatedPasses(Protocol):
    """What it asks of the accumulated gradients, see :class:`~hybridpp_plugins.optimizer_step.AccumulatedGradients`."""

    round: int
    num_passes: int
    num_manual_passes: int

    @property
    def control(self) -> Group: ...

    def start_round(self) -> None: ...

    def nonfinite(self) -> list[str]: ...


@dataclass(frozen=True)
class _Search:
    """The state of a search for the first inf or NaN.

    Attributes:
        round: the round of accumulation that was searched.
        is_done: whether the result is in the report.
        obstacle: why the search was not possible; "" if nothing prevented it.
    """

    round: int = -1
    is_done: bool = False
    obstacle: str = ""


class NonFiniteSteps:
    """Handles the steps of one optimizer whose gradient norm is inf or NaN.

    fp16 skips them and lowers the loss scale; other precisions, whose scale is 1, raise or skip by the user's setting.

    Args:
        config: the settings.
        scales: whether there is a loss scale.
        scaler: counts steps.
        accumulated: the gradients.

    Attributes:
        report: where the last inf or NaN came from, as far as it was searched for; "" before the first one.
    """

    def __init__(self, config: OptimizerConfig, scales: bool, scaler: LossScaler, accumulated: AccumulatedPasses):
        self.report = ""
        self._min_scale = config.loss_scale.min_scale
        self._scales = scales
        self._skips = scales or config.error_if_nonfinite is False
        self._scaler = scaler
        self._accumulated = accumulated
        self._search = _Search()

    def wants_search(self, norm: float) -> bool:
        """Whether gradients of this norm, which is not finite, will be reported; the same on every rank."""
        return not math.isfinite(norm) and self.may_search and not self._current.is_done

    @property
    def may_search(self) -> bool:
        """Whether an inf or NaN in the gradients that are accumulated will be reported, and where it came from."""
        # One that was searched for and then repaired by the script is not searched for again.
        return self._will_warn if self._skips else not self.report

    @property
    def _current(self) -> _Search:
        """The search in the gradients that are accumulated now."""
        return self._search if self._search.round == self._accumulated.round else _Search()

    def found(self, text: str) -> None:
        """Record where an overflow in the last call of ``execute_pipeline`` came from."""
        if (count := self._accumulated.num_passes) > 1:
            text = f"{text} (searched in the last of {count} calls whose gradients add up)"
        self._record(text)

    def _record(self, text: str) -> None:
        self.report, self._search = text, _Search(self._accumulated.round, is_done=True)

    def search_manual_calls(self, search: Callable[[], str] | None, norm: float) -> None:
        """Search in the calls of the model that the script made itself. Collective: all ranks, with the same norm.

        Args:
            search: finds the source of an overflow, or raises ``NotRepeatable``; None: no calls were recorded.
            norm: of the gradients.
        """
        if not (num_manual := self._accumulated.num_manual_passes):
            return
        if search is None:
            self._prevented("calls by the script are not recorded: error_if_nonfinite=True records them")
        elif self.wants_search(norm):
            try:
                text = search()
            except NotRepeatable as reason:
                self._prevented(str(reason))
                return
            if num_others := self._accumulated.num_passes - num_manual:
                calls = f"{num_others} call{'s' if num_others > 1 else ''}"
                text = f"{text} (not searched in {calls} of execute_pipeline that add up with these)"
            self._record(text)

    def _prevented(self, reason: str) -> None:
        self._search = _Search(self._accumulated.round, self._current.is_done, reason)

    def skip(self, norm: float) -> None:
        """Skip a step and lower the loss scale, or refuse the step. Collective: all ranks, with the same norm.

        Raises:
            NonFiniteGradientError: such steps are not skipped.
        """
        if not self._skips:
            self.refuse(norm)
        self._name_parameters()
        will_warn = self._will_warn
        before = self._scaler.update(overflow=True)
        what = f"the gradient norm is {_kind(norm)}: step skipped"
        if self._scales:
            floor = ", the minimum that min_scale allows" if before.scale == self._min_scale else ""
            scales = f"{before.scale:g} -> {self._scaler.state.scale:g}{floor}"
            what = f"a gradient overflowed in fp16: step skipped, loss scale {scales}"
        get_dist_logger().log(
            logging.WARNING if will_warn else logging.DEBUG,
            f"{what} ({self._scaler.skipped_steps} steps so far, see optimizer.skipped_steps). "
            f"The first inf or NaN: {self.report}",
            ranks=[0],
        )
        self._accumulated.start_round()

    def refuse(self, norm: float) -> NoReturn:
        """Raise the error of a refused step. Collective: all ranks."""
        self._name_parameters()
        self._accumulated.start_round()
        raise NonFiniteGradientError(
            f"the gradient norm is {_kind(norm)}, so no weight was changed. The first inf or NaN: {self.report}. Check "
            "the inputs, the loss and the learning rate, or pass error_if_nonfinite=False to skip such steps."
        )

    def report_found_scale(self, scale: float) -> None:
        """Log the loss scale of the first step that was not skipped."""
        get_dist_logger().warning(
            f"the loss scale was found: {scale:g}, after {self._scaler.skipped_steps} skipped steps. Pass "
            f"initial_scale={scale:g} to avoid skipping steps.",
            ranks=[0],
        )

    @property
    def _will_warn(self) -> bool:
        """Whether the next skipped step is reported: the 1st, 10th, 100th, …"""
        return math.log10(self._scaler.skipped_steps + 1).is_integer()

    def _name_parameters(self) -> None:
        """Without a search, report the parameters with inf or NaN gradients. Collective: all ranks."""
        if not self._current.is_done:
            self.report = f"{self._nonfinite_parameters()}; {self._why_not_searched()}"

    def _nonfinite_parameters(self) -> str:
        """A description of the parameters; the same on every rank."""
        rows = gather_objects(self._accumulated.control, _NAMES_PARAMETERS, self._accumulated.nonfinite())
        rank, names = next(((rank, names) for rank, names in enumerate(rows) if names), (0, ["none"]))
        # Backward reaches the last parameters first.
        more = f" and of {len(names) - 1} before it" if len(names) > 1 else ""
        return f"in the gradient of {names[-1]!r}{more} on rank {rank}"

    def _why_not_searched(self) -> str:
        if self._skips and not self._will_warn:
            return "its source was not searched: that is done at the 1st, 10th, 100th, … skipped step"
        if self._current.obstacle:
            return f"its source is not known, because {self._current.obstacle}"
        if not self._skips and self.report:
            return "its source was not searched: that is done once"
        return "its source was not searched: its gradients changed after the backward pass"


def _kind(norm: float) -> str:
    return "NaN" if math.isnan(norm) else "infinite"
