"""Which linear layers read which: autograd's graph of one run, cut at the output of every layer."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from hybridpp.nn import walk
from hybridpp.nn.linear import LinearShape
from hybridpp.nn.torch_private import pytree


@dataclass
class LayerDataflow:
    """What the linear layers of a block read. A source is a layer or parameter, by name, or an argument, by number.

    Attributes:
        reads: the sources of each layer's input, in the order of the layers' first calls.
        result: the sources of the block's first result and of results of the same shape.
        non_tensor_outputs: layers that do not return one tensor (routers); nothing reads them.
    """

    reads: dict[str, frozenset[str | int]] = field(default_factory=dict)
    result: frozenset[str | int] = frozenset()
    non_tensor_outputs: set[str] = field(default_factory=set)

    def layers_read_by(self, name: str) -> set[str]:
        """The layers whose outputs a layer reads."""
        return {source for source in self.reads[name] if isinstance(source, str) and source in self.reads}

    def readers(self, name: str) -> set[str]:
        """The layers that read a layer's output."""
        return {reader for reader, sources in self.reads.items() if name in sources}


def layer_dataflow(
    block: nn.Module, layers: dict[str, LinearShape], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> LayerDataflow:
    """The dataflow of ``block(*args, **kwargs)``; arguments that require gradients are sources.

    Hooks replace the layers' outputs by equal tensors without a graph.
    """
    origins: dict[int, str | int] = {id(parameter): name for name, parameter in walk.named_parameters(block)}
    kept: list[Tensor] = []
    flow = LayerDataflow()
    handles = []

    def cut(name: str) -> Any:
        def hook(module: nn.Module, inputs: tuple[Any, ...], output: Any) -> Any:
            if not isinstance(output, Tensor):
                flow.non_tensor_outputs.add(name)
                return output
            flow.reads[name] = flow.reads.get(name, frozenset()) | _sources(inputs, origins)
            leaf = output.detach().requires_grad_()
            origins[id(leaf)] = name
            kept.append(leaf)
            return leaf.clone()  # not a leaf, so that it may be written to in place

        return hook

    leaves, tree = pytree.tree_flatten((args, kwargs))
    for number, leaf in enumerate(leaves):
        if isinstance(leaf, Tensor) and leaf.requires_grad:
            kept.append(leaf)
            origins[id(leaf)] = number
            leaves[number] = leaf.clone()
    for name in layers:
        handles.append(block.get_submodule(name).register_forward_hook(cut(name)))
    try:
        args, kwargs = pytree.tree_unflatten(leaves, tree)
        with torch.enable_grad():
            flow.result = _sources(_results_like_first(block(*args, **kwargs)), origins)
    finally:
        for handle in handles:
            handle.remove()
    return flow


def _results_like_first(output: Any) -> list[Tensor]:
    tensors = [x for x in pytree.tree_leaves(output) if isinstance(x, Tensor) and x.is_floating_point()]
    return [tensor for tensor in tensors if tensor.shape == tensors[0].shape]


def _sources(tensors: Iterable[Any], origins: dict[int, str | int]) -> frozenset[str | int]:
    """The known leaves of autograd's graph that tensors depend on."""
    return frozenset(
        origins[leaf] for tensor in tensors if isinstance(tensor, Tensor) for leaf in _leaves(tensor) if leaf in origins
    )


def _leaves(tensor: Tensor) -> Iterator[int]:
    if tensor.grad_fn is None:
        yield id(tensor)
        return
    seen, waiting = {tensor.grad_fn}, [tensor.grad_fn]
    while waiting:
        node = waiting.pop()
        variable = getattr(node, "variable", None)
        if variable is not None:
            yield id(variable)
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                waiting.append(following)
