"""The fp16 loss scale as a state machine: nothing here looks at tensors or ranks."""

from dataclasses import dataclass

from hybridpp.config import LossScaleConfig


@dataclass(frozen=True)
class LossScale:
    """The scale and what led to it.

    Attributes:
        scale: factor on the loss.
        clean_steps: steps in a row without overflow.
        overflows: steps in a row with one.
        settled: whether there has been a step without; until then the scale is only looked for.
    """

    scale: float
    clean_steps: int = 0
    overflows: int = 0
    settled: bool = False


def after_step(state: LossScale, overflow: bool, config: LossScaleConfig) -> LossScale:
    """The state for the next step (dynamic loss scaling, Micikevicius et al. 2018, arXiv:1710.03740).

    Hysteresis is for a scale that has worked: until the first step without overflow, each one lowers it.

    Example:
        >>> after_step(LossScale(8.0), True, LossScaleConfig(initial_scale=8.0)).scale
        4.0
    """
    if overflow:
        overflows = state.overflows + 1
        if state.settled and overflows < config.hysteresis:
            return LossScale(state.scale, 0, overflows, settled=True)
        return LossScale(max(config.min_scale, state.scale * config.backoff_factor), settled=state.settled)
    clean_steps = state.clean_steps + 1
    if clean_steps < config.growth_interval:
        return LossScale(state.scale, clean_steps, settled=True)
    return LossScale(min(config.max_scale, state.scale * config.growth_factor), settled=True)
