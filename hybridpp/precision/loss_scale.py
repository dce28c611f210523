"""The fp16 loss scale as a state machine: nothing here reads tensors or communicates."""

from dataclasses import dataclass

from hybridpp.config import LossScaleConfig


@dataclass(frozen=True)
class LossScale:
    """The loss scale and its history.

    Attributes:
        scale: factor on the loss.
        clean_steps: consecutive steps without overflow.
        overflows: steps with overflow since the first step without one, or since the scale last grew.
        settled: whether there has been a step without overflow; before that, the initial scale is still searched.
    """

    scale: float
    clean_steps: int = 0
    overflows: int = 0
    settled: bool = False


def update_loss_scale(state: LossScale, overflow: bool, config: LossScaleConfig) -> LossScale:
    """The state for the next step (dynamic loss scaling, Micikevicius et al. 2018, arXiv:1710.03740).

    Until the first step without overflow, every overflow lowers the scale. After it, the first ``hysteresis - 1``
    overflows do not, and every further overflow does, until the scale grows and the count starts again. So many
    overflows in a short time lower the scale quickly, even with clean steps in between.

    Example:
        >>> update_loss_scale(LossScale(8.0), True, LossScaleConfig(initial_scale=8.0)).scale
        4.0
    """
    if overflow:
        overflows = state.overflows + 1 if state.settled else 0
        if state.settled and overflows < config.hysteresis:
            return LossScale(state.scale, 0, overflows, settled=True)
        scale = max(config.min_scale, state.scale * config.backoff_factor)
        return LossScale(scale, 0, overflows, state.settled)
    clean_steps = state.clean_steps + 1
    if clean_steps < config.growth_interval:
        return LossScale(state.scale, clean_steps, state.overflows, settled=True)
    return LossScale(min(config.max_scale, state.scale * config.growth_factor), settled=True)


class LossScaler:
    """The loss scale of one optimizer, and the steps that it skipped.

    Args:
        config: the settings.
        scales: whether there is a loss scale; without one it is always 1.

    Attributes:
        state: the scale and what led to it.
        skipped_steps: number of steps skipped so far.
        last_step_skipped: whether the last step was skipped.
    """

    def __init__(self, config: LossScaleConfig, scales: bool):
        self.state = LossScale(config.initial_scale if scales else 1.0)
        self.skipped_steps = 0
        self.last_step_skipped = False
        self._config = config
        self._scales = scales

    @property
    def is_active(self) -> bool:
        """Whether there is a loss scale."""
        return self._scales

    def update(self, overflow: bool) -> LossScale:
        """Count a step, which is skipped where a gradient overflowed; returns the state before it."""
        before = self.state
        if self._scales:
            self.state = update_loss_scale(before, overflow, self._config)
        self.last_step_skipped = overflow
        self.skipped_steps += overflow
        return before
