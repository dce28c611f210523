"""What each precision means in torch's dtypes."""

import torch
from torch import nn

from hybridpp.config import Precision

_COMPUTE = {Precision.FP16: torch.float16, Precision.BF16: torch.bfloat16}


def compute_dtype(precision: Precision) -> torch.dtype | None:
    """The dtype of working weights and activations; None leaves the model's own."""
    return _COMPUTE.get(precision)


def cast_parameters(model: nn.Module, precision: Precision) -> None:
    """Bring a model's floating-point parameters and buffers to the precision, in place.

    In fp32, half-precision tensors are widened; float64 stays as it is.
    """
    dtype = compute_dtype(precision)
    halves = (torch.float16, torch.bfloat16)
    if dtype is not None:
        model.to(dtype=dtype)
    elif any(tensor.dtype in halves for tensor in (*model.parameters(), *model.buffers())):
        model.to(dtype=torch.float32)
