"""The formats in which a model will run: a shard that is right in double precision may be refused by a kernel there."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from hybridpp.config import Precision
from hybridpp.module_adapter import AdapterLayer, ModuleAdapter
from hybridpp.nn import walk
from hybridpp.precision import FunctionCasts, ModuleDtypes, dtype_boundaries, dtype_changes, torch_dtype, working_dtype


class BlockFormats(NamedTuple):
    """The formats of one block; equal for blocks that compute in the same. Names are inside the block.

    Attributes:
        tensors: dtypes of its floating-point parameters and buffers, by name.
        boundaries: the function around each module with a dtype of its own, with its first arguments, by name.
        inputs: dtype of its floating-point arguments; None: what the model passes.
        is_half: whether functions cast their arguments, as in half precision.
        fp32_losses: whether loss functions are among these.
        device: where it will run.
    """

    tensors: tuple[tuple[str, torch.dtype], ...]
    boundaries: tuple[tuple[str, tuple[Any, ...]], ...]
    inputs: torch.dtype | None
    is_half: bool
    fp32_losses: bool
    device: torch.device

    def __str__(self) -> str:
        found = [self.inputs] if self.inputs else dict.fromkeys(dtype for _, dtype in self.tensors)
        return ", ".join(str(dtype).removeprefix("torch.") for dtype in found)

    def are_of(self, block: nn.Module) -> bool:
        """Whether a block has these formats without anything that :meth:`put_on` does."""
        held = _floating(block)
        same = all(held[name].dtype is dtype and held[name].device == self.device for name, dtype in self.tensors)
        return same and not self.is_half

    def put_on(self, adapter: ModuleAdapter) -> None:
        """Let a copy of the block, or a rank's shard of it, compute in these formats."""
        block = adapter.model
        held = _floating(block)
        for name, dtype in self.tensors:
            held[name].data = held[name].data.to(self.device, dtype)
        for buffer in walk.buffers(block):
            buffer.data = buffer.data.to(self.device)
        for name, bound in self.boundaries:
            adapter.wrap(walk.submodule(block, name), AdapterLayer.DTYPE, *bound)
        if self.is_half:
            FunctionCasts(adapter, (), self.fp32_losses)

    def of_argument(self, tensor: Tensor, own: torch.dtype) -> Tensor:
        """A tensor argument of the block, of which the model's own dtype is ``own``, as it will be."""
        dtype = self.inputs or own if tensor.is_floating_point() else tensor.dtype
        return tensor.detach().to(self.device, dtype).requires_grad_(tensor.requires_grad)


class RunFormats(NamedTuple):
    """The formats of a model that is not yet cast.

    Attributes:
        precision: of the run.
        module_dtypes: modules in another dtype than the rest.
        fp32_losses: whether loss functions get fp32 arguments in half precision.
        device: where it will run.
    """

    precision: Precision
    module_dtypes: ModuleDtypes
    fp32_losses: bool
    device: torch.device

    def by_block(self, model: nn.Module) -> Callable[[str], BlockFormats]:
        """The formats of each block of the model, by its name."""
        half = torch_dtype(self.precision)
        dtype = working_dtype(model, self.precision)
        changes = dtype_changes(model, dtype, self.module_dtypes)
        boundaries = dtype_boundaries(model, self.module_dtypes, half)

        def of(name: str) -> BlockFormats:
            block = walk.submodule(model, name)
            tensors = tuple((key, changes.get(id(held), held.dtype)) for key, held in _floating(block).items())
            inner = tuple((key, boundaries[part]) for key, part in walk.named_modules(block) if part in boundaries)
            return BlockFormats(tensors, inner, dtype, half is not None, self.fp32_losses, self.device)

        return of

    def described(self, model: nn.Module) -> str:
        """Equal for formats in which equal models run alike."""
        by_dtype = {name: self.module_dtypes.get(part) for name, part in walk.named_modules(model)}
        others = {name: dtype for name, dtype in by_dtype.items() if dtype is not None}
        return repr((self.precision, others, self.fp32_losses, self.device))


def _floating(block: nn.Module) -> dict[str, Tensor]:
    """The floating-point parameters and buffers of a block, by name."""
    held: dict[str, Tensor] = {**dict(walk.named_parameters(block)), **dict(walk.named_buffers(block))}
    return {name: tensor for name, tensor in held.items() if tensor.is_floating_point()}
