"""Placeholders for values that a stage has not received and does not need."""

import torch
from torch import Tensor

from hybridpp.partition.calls import TensorSpec


class Placeholders:
    """Placeholders for values that this stage does not read: correct shape, dtype and device, without memory of their
    own.

    Floating-point ones are NaN, so that the loss becomes NaN if one is read.
    """

    def __init__(self, device: torch.device):
        self._device = device
        self._scalars: dict[torch.dtype, Tensor] = {}

    def get(self, spec: TensorSpec) -> Tensor:
        """A read-only tensor of the given shape and dtype."""
        if spec.dtype not in self._scalars:
            value = float("nan") if spec.dtype.is_floating_point or spec.dtype.is_complex else 0
            self._scalars[spec.dtype] = torch.full((), value, dtype=spec.dtype, device=self._device)
        return self._scalars[spec.dtype].expand(spec.shape)
