"""Check that tensor-parallel ranks compute the same loss."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from hybridpp.cluster import get_dist_logger
from hybridpp.errors import UnequalRanksError

# The same kernels on the same numbers give the same bits, except kernels with a varying order of summation (CUDA
# atomics) and hosts of different kinds. In a mean, such rounding stays below these tolerances, in half precision too.
# Different weights or random numbers soon lead to larger differences.
_RELATIVE, _ABSOLUTE = 1e-3, 1e-5


@dataclass
class TensorParallelLossCheck:
    """Checks the losses of one model.

    Attributes:
        has_warned: whether a difference by rounding was reported.
    """

    has_warned: bool = False

    def check(self, unequal: Mapping[int, float]) -> None:
        """Refuse different losses of tensor-parallel ranks (by rank; empty: they are equal), except by rounding.

        Raises:
            UnequalRanksError: they differ by more than rounding.
        """
        if not unequal:
            return
        low, high = min(unequal.values()), max(unequal.values())
        values = ", ".join(f"{value!r} on rank {rank}" for rank, value in unequal.items())
        if not math.isclose(low, high, rel_tol=_RELATIVE, abs_tol=_ABSOLUTE):
            raise UnequalRanksError(
                f"tensor-parallel ranks must compute the same loss from the same batch: got {values}. Remove what "
                "differs between ranks from the model and the criterion (a rank number, random numbers in the "
                "criterion, a penalty of weights of which each rank has a part), and change weights on all ranks in "
                "the same way, as booster.load_model does."
            )
        if not self.has_warned:
            self.has_warned = True
            get_dist_logger().warning(
                f"tensor-parallel ranks computed losses that differ by rounding: {values}. Their replicated weights "
                "may "
                "diverge; on CUDA, torch.use_deterministic_algorithms(True) prevents it.",
                ranks=[0],
            )
