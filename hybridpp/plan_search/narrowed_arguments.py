"""Which arguments of a module its linear layers read: those that the module may get as narrow as a rank's shard."""

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from hybridpp.nn.torch_private import pytree


def arguments_of_layers(block: nn.Module, name: str, layers: tuple[str, ...], run: Callable[[], Any]) -> dict[int, int]:
    """The widths of the arguments of a module with which layers inside are called, by index.

    Args:
        block: that holds the module.
        name: of the module.
        layers: names of the layers in the block.
        run: runs the block.
    """
    arguments: dict[int, Tensor] = {}
    widths_by_index: dict[int, int] = {}

    def record_arguments(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        leaves = pytree.tree_leaves((args, kwargs))
        arguments.update({index: leaf for index, leaf in enumerate(leaves) if isinstance(leaf, Tensor)})

    def record_widths(module: nn.Module, args: tuple[Any, ...]) -> None:
        widths_by_index.update(
            {index: leaf.shape[-1] for index, leaf in arguments.items() if any(leaf is arg for arg in args)}
        )

    hooks = [block.get_submodule(name).register_forward_pre_hook(record_arguments, with_kwargs=True)]
    hooks += [block.get_submodule(layer).register_forward_pre_hook(record_widths) for layer in layers]
    try:
        run()
    finally:
        for hook in hooks:
            hook.remove()
    return widths_by_index
