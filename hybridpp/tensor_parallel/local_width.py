"""Modules that read the width of their layers' outputs from an argument's shape: ``B, S, C = x.shape``."""

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn

from hybridpp.module_adapter import AdapterLayer, ModuleAdapter
from hybridpp.nn.linear import linear_shape
from hybridpp.nn.torch_private import pytree

# The attribute of a narrowed tensor that holds the full one.
_WHOLE = "_hybridpp_whole"


def run_on_local_width(adapter: ModuleAdapter, module: nn.Module, widths: Mapping[int, int], size: int) -> None:
    """Let a module get arguments as wide as its sharded layers' outputs, and those layers the full arguments.

    A narrowed argument is the first columns of the full one; the module may use only its shape. Linear layers inside
    that get such a tensor itself get the full one, by hooks.

    Args:
        adapter: of the model.
        module: whose forward computes with the shapes.
        widths: full widths of the arguments, by their number among all leaves of the call; other tensors stay.
        size: number of ranks.
    """
    adapter.wrap(module, AdapterLayer.LOCAL_WIDTH, _run, widths, size)
    for inner in module.modules():
        if linear_shape(inner) is not None:
            adapter.hooked(inner, "hook on its complete input", inner.register_forward_pre_hook(_with_wholes))


def _run(widths: Mapping[int, int], size: int, forward: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    leaves, tree = pytree.tree_flatten((args, kwargs))
    narrow: dict[int, Tensor] = {}
    for number, width in widths.items():
        leaf = leaves[number] if number < len(leaves) else None
        if isinstance(leaf, Tensor) and leaf.shape[-1:] == (width,):
            if id(leaf) not in narrow:
                narrow[id(leaf)] = leaf.narrow(-1, 0, width // size)
                setattr(narrow[id(leaf)], _WHOLE, leaf)
            leaves[number] = narrow[id(leaf)]
    args, kwargs = pytree.tree_unflatten(leaves, tree)
    return forward(*args, **kwargs)


def _with_wholes(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(getattr(leaf, _WHOLE, leaf) for leaf in args)


def arguments_of_layers(block: nn.Module, name: str, layers: tuple[str, ...], run: Callable[[], Any]) -> dict[int, int]:
    """The arguments of a module that layers inside are called with, by number; with their widths.

    Args:
        block: that holds them.
        name: of the module.
        layers: their names in the block.
        run: runs the block.
    """
    given: dict[int, Tensor] = {}
    found: dict[int, int] = {}

    def note(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        leaves = pytree.tree_leaves((args, kwargs))
        given.update({number: leaf for number, leaf in enumerate(leaves) if isinstance(leaf, Tensor)})

    def look(module: nn.Module, args: tuple[Any, ...]) -> None:
        found.update({number: leaf.shape[-1] for number, leaf in given.items() if any(leaf is arg for arg in args)})

    hooks = [block.get_submodule(name).register_forward_pre_hook(note, with_kwargs=True)]
    hooks += [block.get_submodule(layer).register_forward_pre_hook(look) for layer in layers]
    try:
        run()
    finally:
        for hook in hooks:
            hook.remove()
    return found
