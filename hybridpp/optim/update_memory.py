"""Memory that torch's Adam and AdamW take while they update."""

from collections.abc import Collection, Iterable
from itertools import pairwise
from typing import Literal, assert_never

AdamKernels = Literal["fused", "foreach", "loop"]
"""How an update is computed: by fused kernels, by operations on lists of all tensors, or one tensor after another."""


def adam_kernels(device_type: str, fuses_on: Collection[str]) -> AdamKernels:
    """How an Adam that leaves the choice to torch updates.

    Args:
        device_type: of the parameters.
        fuses_on: the kinds of devices on which it is fused at boost.
    """
    if device_type in fuses_on:
        return "fused"
    return "loop" if device_type == "cpu" else "foreach"


def adam_update_bytes(sizes: Iterable[int], kernels: AdamKernels) -> int:
    """The most temporary memory that an update takes at once.

    Not counted: AMSGrad, and weight decay of Adam that is not AdamW, whose loop takes a copy of the gradient.

    Args:
        sizes: bytes of the tensors that are updated, in the optimizer's order.
        kernels: those of the update.
    """
    match kernels:
        case "fused":
            return 0
        case "foreach":
            return sum(sizes)  # roots of all second moments
        case "loop":
            # The root and the denominator of one, beside the denominator of the last, which is kept until then.
            return max((before + 2 * own for before, own in pairwise((0, *sizes))), default=0)
        case _:
            assert_never(kernels)
