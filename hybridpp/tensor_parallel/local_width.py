"""Modules that read the width of their layers' outputs from an argument's shape: ``B, S, C = x.shape``."""

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn

from hybridpp.module_adapter import AdapterLayer, ModuleAdapter
from hybridpp.nn.linear import linear_shape
from hybridpp.nn.torch_private import pytree

# The attribute of a narrowed tensor that holds the full one.
_FULL = "_hybridpp_full"


def run_on_local_width(adapter: ModuleAdapter, module: nn.Module, widths: Mapping[int, int], size: int) -> None:
    """Let a module get arguments as wide as its sharded layers' outputs, and those layers the full arguments.

    A narrowed argument is the first columns of the full one; the module may use only its shape. Linear layers inside
    that are called with a narrowed argument get the full one, by hooks.

    Args:
        adapter: of the model.
        module: whose forward computes with the shapes.
        widths: full widths of the arguments, by their index among all leaves of the call; others do not change.
        size: number of ranks.
    """
    adapter.wrap(module, AdapterLayer.LOCAL_WIDTH, _run, widths, size)
    for inner in module.modules():
        if linear_shape(inner) is not None:
            adapter.hooked(inner, "hook on its complete input", inner.register_forward_pre_hook(_with_full_arguments))


def _run(widths: Mapping[int, int], size: int, forward: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    leaves, tree = pytree.tree_flatten((args, kwargs))
    narrowed: dict[int, Tensor] = {}
    for index, width in widths.items():
        leaf = leaves[index] if index < len(leaves) else None
        if isinstance(leaf, Tensor) and leaf.shape[-1:] == (width,):
            if id(leaf) not in narrowed:
                narrowed[id(leaf)] = leaf.narrow(-1, 0, width // size)
                setattr(narrowed[id(leaf)], _FULL, leaf)
            leaves[index] = narrowed[id(leaf)]
    args, kwargs = pytree.tree_unflatten(leaves, tree)
    return forward(*args, **kwargs)


def _with_full_arguments(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(getattr(leaf, _FULL, leaf) for leaf in args)
