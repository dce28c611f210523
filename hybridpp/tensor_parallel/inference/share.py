"""One rank's share of a block, to be compared with the whole."""

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from hybridpp.cluster import Group
from hybridpp.tensor_parallel.collectives import copy_to_ranks, sum_over_ranks
from hybridpp.tensor_parallel.crossings import Crossings
from hybridpp.tensor_parallel.division import Division, Part
from hybridpp.tensor_parallel.inference.run import copy_of
from hybridpp.tensor_parallel.joined import run_on_whole
from hybridpp.tensor_parallel.linear import layer_of
from hybridpp.tensor_parallel.narrowed import run_narrowed


def _part(tensor: Tensor, part: Part, group: Group) -> Tensor:
    return part.of(tensor, group.rank, group.size)


def _piece(weight: Tensor, part: Part, group: Group, module: nn.Module) -> Tensor:
    """A view, if the part is in one piece and its rows are not torn apart, or belong to a linear layer."""
    index = part.index(group.rank, group.size, weight.shape[part.dim])
    start, length = int(index[0]) if len(index) else 0, len(index)
    in_one = torch.equal(index, torch.arange(start, start + length))
    if in_one and (part.dim == 0 or layer_of(module) is not None):
        return weight.narrow(part.dim, start, length)
    return _part(weight, part, group)


def _whole(own: Tensor, part: Part, group: Group) -> Tensor:
    """All ranks' parts in their places; each rank's gradient is that of its own."""
    size = own.shape[part.dim] * group.size
    shape = (*own.shape[: part.dim], size, *own.shape[part.dim + 1 :])
    places = part.index(group.rank, group.size, size).to(own.device)
    return sum_over_ranks(own.new_zeros(shape).index_add(part.dim, places, own), group)


def divide(block: nn.Module, division: Division, group: Group) -> nn.Module:
    """A copy of a block that is this rank's share of it; weights share their memory where they can.

    Collectives of its forward: sums over ``group``.
    """
    block = copy_of(block)
    for name, part in division.parts.items():
        owner, _, key = name.rpartition(".")
        module = block.get_submodule(owner)
        parameter = module._parameters[key]
        assert parameter is not None
        own = module._parameters[key] = nn.Parameter(_piece(parameter.detach(), part, group, module))
        if key == "weight" and isinstance(getattr(module, "nf", None), int):
            vars(module)["nf"] = own.shape[1]  # transformers' Conv1D looks at it
    for name in division.first_only if group.rank else ():
        owner, _, key = name.rpartition(".")
        module = block.get_submodule(owner)
        bias = module._parameters[key]
        assert bias is not None
        module._parameters[key] = nn.Parameter(torch.zeros_like(bias))
    for (name, attribute), value in division.attributes.items():
        holder: Any = block.get_submodule(name)
        if "." in attribute:  # a configuration is everyone's: this module gets its own
            first, _, attribute = attribute.partition(".")
            setattr(holder, first, copy.copy(getattr(holder, first)))
            holder = getattr(holder, first)
        setattr(holder, attribute, value)

    _attach(block, division, group)
    return block


def _attach(block: nn.Module, division: Division, group: Group) -> None:
    def copied(leaf: Any) -> Any:
        return copy_to_ranks(leaf, group) if isinstance(leaf, Tensor) else leaf

    def enter(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return pytree.tree_map(copied, (args, kwargs))

    def leave(module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        return pytree.tree_map(copied, output)

    def total(module: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor:
        return sum_over_ranks(output.clone(), group)

    def take(number: int, part: Part) -> Any:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            leaves, tree = pytree.tree_flatten((args, kwargs))
            leaf = leaves[number]
            if isinstance(leaf, Tensor):
                leaves[number] = _part(copied(leaf), part, group)
            return pytree.tree_unflatten(leaves, tree)

        return hook

    def gather(number: int, part: Part) -> Any:
        def hook(module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
            leaves, tree = pytree.tree_flatten(output)
            if isinstance(leaves[number], Tensor):
                leaves[number] = _whole(leaves[number], part, group)
            return pytree.tree_unflatten(leaves, tree)

        return hook

    for name, widths in division.narrow_modules().items():
        run_narrowed(block.get_submodule(name), widths, group.size)
    for name, part in division.joins.items():
        run_on_whole(block.get_submodule(name), part, Crossings(group))
    for name in division.enters:
        block.get_submodule(name).register_forward_pre_hook(enter, with_kwargs=True)
    for name in division.spreads:
        block.get_submodule(name).register_forward_hook(leave)
    for name in division.sums:
        block.get_submodule(name).register_forward_hook(total)
    for (name, number), part in division.arguments.items():
        block.get_submodule(name).register_forward_pre_hook(take(number, part), with_kwargs=True)
    for (name, number), part in division.results.items():
        block.get_submodule(name).register_forward_hook(gather(number, part))
