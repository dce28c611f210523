"""A copy of a model without its numbers, for tracing."""

import copy
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode


class Skeleton:
    """A model's structure with fake parameters and buffers: nothing is allocated, and nothing it computes is real.

    Args:
        model: the original; only read.
        device: where the fakes pretend to be.
        dtype: of its floating-point tensors; None keeps each one's own.

    Attributes:
        model: the copy; same classes, names and attributes as the original.
        mode: the mode that its tensors belong to.
        parameter_names: the global name of each fake parameter, by ``id``; a tied parameter has its first name.
        buffer_ids: ``id`` of each fake buffer.
    """

    def __init__(self, model: nn.Module, device: torch.device, dtype: torch.dtype | None):
        self.mode = FakeTensorMode(allow_non_fake_inputs=True)
        memo: dict[int, Any] = {}
        for tensor in (*model.parameters(), *model.buffers()):
            memo[id(tensor)] = self._fake(tensor, device, dtype if tensor.is_floating_point() else None)
        # deepcopy takes what stands in the memo for the copy: the numbers are never duplicated.
        self.model: nn.Module = copy.deepcopy(model, memo)
        self.parameter_names = {id(parameter): name for name, parameter in self.model.named_parameters()}
        self.buffer_ids = {id(buffer) for buffer in self.model.buffers()}

    def _fake(self, tensor: torch.Tensor, device: torch.device, dtype: torch.dtype | None) -> torch.Tensor:
        with self.mode:
            fake = torch.empty_strided(tensor.size(), tensor.stride(), dtype=dtype or tensor.dtype, device=device)
        if isinstance(tensor, nn.Parameter):
            return nn.Parameter(fake, requires_grad=tensor.requires_grad)
        return fake

    def follow(self, model: nn.Module) -> None:
        """Take over which modules of the original are in training mode."""
        for mine, original in zip(self.model.modules(), model.modules(), strict=True):
            mine.training = original.training
