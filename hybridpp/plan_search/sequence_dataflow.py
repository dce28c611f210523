"""Which modules of a block take and return hidden states: observed in one run."""

from typing import Any, NamedTuple

from torch import Tensor, nn

from hybridpp.nn.linear import is_linear
from hybridpp.nn.torch_private import pytree
from hybridpp.plan_search.block_run import ReferenceBlock, copy_block
from hybridpp.tensor_parallel.sequence_block import Key


class SequenceDataflow(NamedTuple):
    """Where the hidden states of a block, ``[B, S, H]``, go; modules by name, in the order of their calls.

    Attributes:
        hidden: the block's argument that holds them; None: no argument is just these.
        reads: the arguments of each module that depend on them and have their batch and sequence dimensions; of a
            linear layer also those of shape ``[B * S, H]``.
        results: which leaves of a module's results do.
        flat: which leaves have the shape ``[B * S, H]``, for modules other than linear layers.
    """

    hidden: Key | None
    reads: dict[str, dict[Key, Tensor]]
    results: dict[str, tuple[int, ...]]
    flat: dict[str, tuple[int, ...]]


def sequence_dataflow(reference: ReferenceBlock, index: int) -> SequenceDataflow:
    """The dataflow of the tensor with this index in a block's call."""
    block, call = copy_block(reference.block).requires_grad_(False), reference.call
    tensors = [x.detach().requires_grad_(number == index).clone() for number, x in enumerate(call.tensors)]
    batch, length = tensors[index].shape[:2]
    flow = SequenceDataflow(
        next((key for key, x in keyed(*call.arguments(tensors)) if x is tensors[index]), None), {}, {}, {}
    )

    def is_flat(x: Any) -> bool:
        return isinstance(x, Tensor) and x.requires_grad and x.dim() == 2 and len(x) == batch * length

    def is_hidden(x: Any, module: nn.Module) -> bool:
        if not isinstance(x, Tensor) or not x.requires_grad:
            return False
        return (is_flat(x) and is_linear(module)) or (x.dim() == 3 and x.shape[:2] == (batch, length))

    def before_call(name: str) -> Any:
        def note(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            flow.reads.setdefault(name, {key: x for key, x in keyed(args, kwargs) if is_hidden(x, module)})

        return note

    def after_call(name: str) -> Any:
        def note(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            leaves = list(enumerate(pytree.tree_leaves(output)))
            flow.results.setdefault(name, tuple(number for number, x in leaves if is_hidden(x, module)))
            flow.flat.setdefault(name, tuple(number for number, x in leaves if is_flat(x) and not is_linear(module)))

        return note

    for name, module in block.named_modules():
        if name:
            module.register_forward_pre_hook(before_call(name), with_kwargs=True)
            module.register_forward_hook(after_call(name))
    call.run(block, tensors)
    return flow


def keyed(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[tuple[Key, Any]]:
    """Arguments by index and by name."""
    return [*enumerate(args), *kwargs.items()]
