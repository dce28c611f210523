"""Half-precision formats."""

from torch import Tensor, bfloat16, float16

HALF_DTYPES = (float16, bfloat16)


def widened(tensor: Tensor) -> Tensor:
    """The tensor in fp32 if it is in half precision; otherwise the tensor itself."""
    return tensor.float() if tensor.dtype in HALF_DTYPES else tensor
