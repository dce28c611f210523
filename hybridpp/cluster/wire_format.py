"""Tensors in the form in which every backend carries them."""

import torch
from torch import Tensor

# NCCL has a type for each of these, and gloo all that it needs; both refuse the others (int16, uint16, complex numbers,
# most 8-bit floats) in some or all operations. What is only moved travels as bytes then.
CARRIED_DTYPES = frozenset(
    {
        torch.float16,
        torch.bfloat16,
        torch.float32,
        torch.float64,
        torch.uint8,
        torch.int8,
        torch.int32,
        torch.int64,
        torch.bool,
    }
)


def resolved(tensor: Tensor) -> Tensor:
    """The tensor, whose memory holds its numbers: not a view that negates or conjugates them when they are read."""
    return tensor.resolve_conj().resolve_neg()


def as_carried(tensor: Tensor) -> Tensor:
    """A contiguous tensor, or a view of its bytes where a backend may refuse its dtype; for messages and gathering."""
    return tensor if tensor.dtype in CARRIED_DTYPES else tensor.view(-1).view(torch.uint8)
