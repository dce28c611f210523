"""Which parts of a model's forward draw random numbers, as its first micro-batch in each mode shows."""

from typing import Any

from torch import nn

from hybridpp.cluster import get_dist_logger
from hybridpp.nn import walk
from hybridpp.partition.drawing_code import is_rate

# Modes whose parts are kept; the least recently used is dropped.
_MAX_MODES = 16


class DrawingParts:
    """For each part of a stage's forward (an RNG stream) whether it draws, by mode; parts not seen yet are missing.

    The mode is what usually decides it: the training flags of all modules, the rates of dropout that they hold, and
    whether gradients are enabled.

    Args:
        model: its modules may be replaced later; then the mode does not show what the new ones draw.
    """

    def __init__(self, model: nn.Module):
        self._held = [vars(module) for module in walk.modules(model)]
        self._rates = [
            (held, name)
            for held in self._held
            for name, value in held.items()
            if type(value) in (int, float) and is_rate(name, value)  # most are neither
        ]
        self._by_mode: dict[Any, dict[int, bool]] = {}

    def now(self, stage: int, is_grad_enabled: bool) -> dict[int, bool]:
        """What is known of a stage in the present mode, to be added to. What it does not run draws nothing there."""
        flags = [held.get("training") for held in self._held]
        mode = stage, is_grad_enabled, *flags, *[held.get(name) for held, name in self._rates]
        parts = self._by_mode.pop(mode, None)
        self._by_mode[mode] = parts = {} if parts is None else parts  # now the most recent
        while len(self._by_mode) > _MAX_MODES:
            del self._by_mode[next(iter(self._by_mode))]
        return parts


def warn_of_draws(names: list[str]) -> None:
    """Warn that one of these units, in the order of the forward, or the code after one drew unexpectedly."""
    where = repr(names[0]) if len(set(names)) == 1 else f"one of {names[0]!r} to {names[-1]!r}"
    get_dist_logger().warning(
        f"random numbers were drawn where no micro-batch before had drawn any: in {where}, or in the code after it. In "
        "this micro-batch they may depend on the layout; from now on they do not. They never do where the first "
        "micro-batch in training mode (or evaluation mode) draws already."
    )
