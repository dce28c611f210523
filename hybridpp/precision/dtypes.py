"""What each precision means in torch's dtypes."""

import torch
from torch import nn

from hybridpp.config import Precision

_HALF = {Precision.FP16: torch.float16, Precision.BF16: torch.bfloat16}


def working_dtype(model: nn.Module, precision: Precision) -> torch.dtype | None:
    """The dtype of a model's working weights and activations; None leaves the model's own.

    In fp32, a model with half-precision tensors is widened; float64 stays as it is.
    """
    if precision in _HALF:
        return _HALF[precision]
    tensors = (*model.parameters(), *model.buffers())
    return torch.float32 if any(tensor.dtype in _HALF.values() for tensor in tensors) else None
