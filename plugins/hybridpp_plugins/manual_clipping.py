"""Detect gradients that the script scaled between backward and step with different factors on different ranks."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch

from hybridpp.cluster import get_dist_logger
from hybridpp.data_parallel import GradientReducer
from hybridpp.errors import ConfigError
from hybridpp.optim import gradient_norms, total_norm

# Tolerances: rounding of fp32 products; and the small term that torch adds to the norm when it clips.
_ONE_FACTOR, _ONE_NORM = 1e-5, 1e-3
_INSTEAD = "Call optimizer.clip_grad_by_norm(max_norm), or set HybridParallelPlugin(max_norm=...)."


class ManualScaling(NamedTuple):
    """How the script scaled a rank's gradients.

    Attributes:
        factor: the common factor of all gradients; 0: there is none, as they were not changed or changed otherwise; -1:
            the rank has no gradients.
        norm: of all gradients after the scaling.
    """

    factor: float = 0.0
    norm: float = 0.0


class ManualClippingDetector:
    """Detects ``torch.nn.utils.clip_grad_norm_``, which clips each rank by the norm of this rank's gradients.

    It multiplies all gradients of a rank by one factor, and gives every rank that it clips the same norm. Other common
    changes do not (clipping by value, noise, factors for some or all parameters).

    Args:
        reducer: the gradients, which the script sees in ``parameter.grad``.
    """

    def __init__(self, reducer: GradientReducer):
        self._reducer = reducer
        self._version: tuple[int, ...] | None = None
        self._before: list[torch.Tensor] = []
        self._found = ManualScaling()
        self._has_warned = False

    def record(self) -> None:
        """Call after backward passes, and after the library changes gradients. Does not wait for the device."""
        # Gradients that are not reduced yet will change.
        self._version = None
        if self._reducer.is_syncing:
            self._before, self._version = self._reducer.sample(), self._reducer.version

    def detect(self) -> None:
        """Call before gradients are used. Waits for the device only if they were written to since :meth:`record`."""
        if self._version in (None, self._reducer.version):
            return
        self._version = None
        pairs = zip(self._before, self._reducer.sample(), strict=True)
        factors = torch.cat([(now.double() / before)[before != 0] for before, now in pairs]).tolist()
        if not factors:
            self._found = ManualScaling(-1.0)
        elif max(factors) - min(factors) <= _ONE_FACTOR * abs(factors[0]):
            self._found = ManualScaling(
                factors[0], total_norm(gradient_norms(list(self._reducer.gradients.values())).tolist())
            )

    def report(self) -> ManualScaling:
        """The scaling that was detected since the last call."""
        found, self._found = self._found, ManualScaling()
        return found if self._reducer.parameters else ManualScaling(-1.0)

    def check(self, ranks: Sequence[ManualScaling]) -> None:
        """Refuse the scaling of all ranks, in rank order, if it looks like clipping by each rank's own norm.

        Raises:
            ConfigError: it does.
        """
        scaled = {rank: one for rank, one in enumerate(ranks) if one.factor != -1}
        if not scaled or any(not 0 < one.factor <= 1 + _ONE_FACTOR for one in scaled.values()):
            return
        clipped = [one for one in scaled.values() if one.factor < 1 - _ONE_FACTOR]
        if not clipped:
            self._warn()
            return
        factors = [one.factor for one in scaled.values()]
        limit = max(one.norm for one in clipped)
        if math.isclose(min(factors), max(factors), rel_tol=_ONE_FACTOR):
            return
        if min(one.norm for one in clipped) < limit * (1 - _ONE_NORM):
            return
        if max(one.norm for one in scaled.values()) > limit * (1 + _ONE_NORM):
            return
        each = ", ".join(f"{one.factor:.4g} on rank {rank}" for rank, one in scaled.items())
        raise ConfigError(
            f"the script multiplied gradients before the last step by different factors, as "
            f"torch.nn.utils.clip_grad_norm_ does: {each}. It uses the norm of one rank's gradients, not of the "
            "complete "
            f"model's. {_INSTEAD}"
        )

    def _warn(self) -> None:
        if not self._has_warned:
            self._has_warned = True
            get_dist_logger().warning(
                "the script wrote to gradients before the last step without changing their values. If that was "
                "torch.nn.utils.clip_grad_norm_: it uses the norm of one rank's gradients, not of the complete "
                "model's. "
                f"{_INSTEAD}",
                ranks=[0],
            )
