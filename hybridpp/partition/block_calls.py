"""Arguments of a model's blocks, for models whose weights are not loaded."""

from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor, nn

from hybridpp.module_adapter import AdapterLayer, ModuleAdapter
from hybridpp.nn.snapshot import preserved_modules
from hybridpp.nn.torch_private import FakeTensor, pytree
from hybridpp.partition.blocks import find_units, finest_units
from hybridpp.partition.calls import CallArguments
from hybridpp.partition.intercept import Interceptor
from hybridpp.partition.trace import Tracer


def block_calls(
    model: nn.Module, blocks: Collection[str], sample: CallArguments, training: bool = False
) -> dict[str, CallArguments]:
    """The arguments of each block's first call in a forward, by the block's name, without using the model's weights.

    The forward is traced. What container code makes of the inputs (masks, position numbers) is real; what stems from
    units has placeholder values: random floats, zero integers, ``True``.

    Args:
        model: also on the meta device; it is not changed.
        blocks: names of the modules; none of them holds another one.
        sample: positional and keyword arguments of one micro-batch, on the CPU.
        training: whether the forward is traced in training mode.
    """
    calls: dict[str, CallArguments] = {}

    def note(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if name in blocks and name not in calls:
            generator = torch.Generator().manual_seed(0)
            calls[name] = pytree.tree_map_only(Tensor, lambda leaf: _real(leaf, generator), (args, kwargs))

    with preserved_modules(model):
        model.train(training)
        adapter = ModuleAdapter(model)
        finest = Interceptor(adapter, AdapterLayer.UNIT_RNG, finest_units(model))
        interceptor = Interceptor(adapter, AdapterLayer.STAGE, find_units(model, 1, tuple(blocks)).units)
        Tracer(model, interceptor, finest, torch.device("cpu")).trace(*sample, watch=note)
    return calls


def _real(leaf: Tensor, generator: torch.Generator) -> Tensor:
    if not isinstance(leaf, FakeTensor):
        return leaf.detach().clone().requires_grad_(leaf.requires_grad)
    if leaf.dtype.is_floating_point or leaf.dtype.is_complex:
        numbers = torch.randn(leaf.shape, generator=generator, dtype=leaf.dtype)
        return numbers.requires_grad_(leaf.requires_grad)
    return torch.full(leaf.shape, leaf.dtype == torch.bool, dtype=leaf.dtype)
