"""The inputs of the model on the device and in the dtype that its forward computes with."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from hybridpp.nn.torch_private import pytree
from hybridpp.partition.calls import CallArguments


class ModelInputs(NamedTuple):
    """How inputs of a model are converted.

    Attributes:
        device: where the forward computes.
        dtype: floating-point inputs are cast to it; None: they keep their dtypes.
    """

    device: torch.device
    dtype: torch.dtype | None

    def cast(self, tree: Any) -> Any:
        """``tree`` with floating-point tensors in the compute dtype."""
        dtype = self.dtype
        if dtype is None:
            return tree
        return pytree.tree_map_only(Tensor, lambda leaf: leaf.to(dtype) if leaf.is_floating_point() else leaf, tree)

    def prepare(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> CallArguments:
        """Copies of a call's arguments, cast and on the device, for a trace."""

        def move(leaf: Tensor) -> Tensor:
            # A copy: container code that writes to the model's inputs must not do so twice, once for the trace.
            return leaf.to(self.device, copy=True)

        with torch.inference_mode(False):
            args, kwargs = pytree.tree_map_only(Tensor, move, (args, kwargs))
            return self.cast(args), self.cast(kwargs)
