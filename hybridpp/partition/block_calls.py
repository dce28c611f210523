"""What the blocks of a model are called with, where the model has no weights that it could run with."""

from collections.abc import Collection
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils import _pytree as pytree

from hybridpp.partition.blocks import dissect, finest_units
from hybridpp.partition.intercept import Interceptor
from hybridpp.partition.trace import Tracer
from hybridpp.partition.untouched import untouched

Call: TypeAlias = tuple[tuple[Any, ...], dict[str, Any]]


def block_calls(model: nn.Module, blocks: Collection[str], sample: Call, training: bool = False) -> dict[str, Call]:
    """What the first call of each block gets in a forward, by the block's name; none of the model's weights is needed.

    The forward is traced. What glue makes of the inputs (masks, position numbers) is real; what
    stems from units has made-up numbers: random ones, zeros where they are whole, ``True``.

    Args:
        model: also on the meta device; it is left as it was found.
        blocks: names of the modules; none of them holds another one.
        sample: positional and keyword arguments of one micro-batch, on the CPU.
        training: in which mode the forward is traced.
    """
    calls: dict[str, Call] = {}

    def note(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if name in blocks and name not in calls:
            generator = torch.Generator().manual_seed(0)
            calls[name] = pytree.tree_map_only(Tensor, lambda leaf: _real(leaf, generator), (args, kwargs))

    with untouched(model):
        model.train(training)
        finest = Interceptor(model, finest_units(model))
        interceptor = Interceptor(model, dissect(model, 1, tuple(blocks)).units)
        Tracer(model, interceptor, finest, torch.device("cpu")).trace(*sample, watch=note)
    return calls


def _real(leaf: Tensor, generator: torch.Generator) -> Tensor:
    if not isinstance(leaf, FakeTensor):
        return leaf.detach().clone().requires_grad_(leaf.requires_grad)
    if leaf.dtype.is_floating_point or leaf.dtype.is_complex:
        numbers = torch.randn(leaf.shape, generator=generator, dtype=leaf.dtype)
        return numbers.requires_grad_(leaf.requires_grad)
    return torch.full(leaf.shape, leaf.dtype == torch.bool, dtype=leaf.dtype)
