"""Detect gradients that the script scaled between backward and step with different factors on different ranks."""

import math
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple
from zlib import crc32

import torch

from hybridpp.cluster import get_dist_logger, name_ranks
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
        first, second, third: for one of three sets of the parameters of which the rank holds a shard, a sum of weights
            times the logarithms of their factors: equal on ranks with the same factors. NaN: one has no common factor.
    """

    factor: float = 0.0
    norm: float = 0.0
    first: float = 0.0
    second: float = 0.0
    third: float = 0.0


# What is not known of one parameter hides the others of its set.
_NUM_SETS = len(ManualScaling._fields) - 2


class ManualClippingDetector:
    """Detects ``torch.nn.utils.clip_grad_norm_``, which clips each rank by the norm of this rank's gradients.

    It multiplies all gradients of a rank by one factor, and gives every rank that it clips the same norm. Other common
    changes do not (clipping by value, noise, factors for some or all parameters). Called for single parameters, it
    multiplies the shards of one by different factors.

    Args:
        reducer: the gradients, which the script sees in ``parameter.grad``.

    Attributes:
        sharded: parameters of which this rank holds a shard, by name.
        peers: groups of ranks that hold shards of the same parameters.
    """

    def __init__(self, reducer: GradientReducer):
        self.sharded: Collection[str] = ()
        self.peers: Sequence[Sequence[int]] = ()
        self._reducer = reducer
        self._shards_before: Mapping[str, torch.Tensor] = {}
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
            if self.sharded:
                self._shards_before = self._reducer.samples_of(self.sharded)

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
        if self.sharded:
            self._found = ManualScaling(self._found.factor, self._found.norm, *self._parts())

    def _parts(self) -> list[float]:
        """The sums of :class:`ManualScaling`."""
        sums = [0.0] * _NUM_SETS
        after = self._reducer.samples_of(self.sharded)
        factors = {name: (after[name].double() / before)[before != 0] for name, before in self._shards_before.items()}
        if not factors:
            return sums
        on_host = iter(torch.cat(list(factors.values())).tolist())
        for name, some in factors.items():
            values = [next(on_host) for _ in some]
            # Of one element, clipping by value would look the same.
            is_one = len(values) > 1 and max(values) - min(values) <= _ONE_FACTOR * abs(values[0]) and values[0] > 0
            number = crc32(name.encode())
            sums[number % _NUM_SETS] += (1 + number / 2**32) * math.log(values[0]) if is_one else math.nan
        return sums

    def report(self) -> ManualScaling:
        """The scaling that was detected since the last call."""
        found, self._found = self._found, ManualScaling()
        return found if self._reducer.parameters else ManualScaling(-1.0)

    def check(self, ranks: Sequence[ManualScaling]) -> None:
        """Refuse the scaling of all ranks, in rank order, if it looks like clipping by each rank's own norm.

        Raises:
            ConfigError: it does, or the shards of a parameter were multiplied by different factors.
        """
        self._check_all(ranks)
        for group in self.peers:
            for of_set in zip(*(ranks[rank][-_NUM_SETS:] for rank in group), strict=True):
                known = [one for one in of_set if not math.isnan(one)]
                if known and max(known) - min(known) > _ONE_FACTOR * len(self.sharded):
                    raise ConfigError(
                        "the script multiplied the gradients of shards of one parameter before the last step by "
                        f"different factors on {name_ranks(group)}, as torch.nn.utils.clip_grad_norm_ of single "
                        "parameters does: it uses the norms of shards, not of parameters. Add the squares of norms "
                        "over torch.distributed's plugin.tp_group, or use tp_size=1; to clip by the norm of all "
                        "gradients, call optimizer.clip_grad_by_norm(max_norm)."
                    )

    def _check_all(self, ranks: Sequence[ManualScaling]) -> None:
        """Refuse the factors of whole ranks."""
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
