"""Modules that take the width of what their layers make from what they are given: ``B, S, C = x.shape``."""

import functools
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn
from torch.utils import _pytree as pytree

from hybridpp.tensor_parallel.linear import layer_of

# Where a tensor says what it stands for.
_WHOLE = "_hybridpp_whole"


def run_narrowed(module: nn.Module, widths: Mapping[int, int], size: int) -> None:
    """Let a module see arguments as wide as what its divided layers make of them, while the layers see them whole.

    What it is given in their place are their first columns; of these, only the shape may matter. Linear layers inside
    that are called with such a tensor itself get the whole one. Only the instance attribute ``forward`` is set, and
    hooks on the layers.

    Args:
        module: whose forward computes with the shapes.
        widths: of the arguments, by their number among all leaves of the call; others keep their own.
        size: number of ranks.
    """
    # functools.partial and no closure, so that the model can still be copied.
    module.forward = functools.partial(_run, widths, size, module.forward)
    for inner in module.modules():
        if layer_of(inner) is not None:
            inner.register_forward_pre_hook(_with_wholes)


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
    """Which arguments of a module are what layers inside are called with, by number; with their widths.

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
