"""Tell what is made of weights alone from what samples are in, by the functions that a forward calls."""

import weakref
from collections.abc import Iterable, Iterator
from contextlib import suppress
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import Node

from hybridpp.nn import walk
from hybridpp.nn.torch_private import DisableTorchFunctionSubclass

_NOTE = "hybridpp: source"
# Of containers in arguments, results and attributes.
_LEVELS = 3


class GradientSource(NamedTuple):
    """What a tensor is made of that a gradient flows through.

    Attributes:
        weight: the name of a weight, if it is made of weights and constants alone; empty: samples are in it.
        num_samples: in the part of the batch, if that is known.
    """

    weight: str
    num_samples: int | None


class Sources:
    """Follows tensors through the functions that are called in one forward.

    What is no parameter, buffer or attribute of the model, and not made here, is of samples. The nodes of the graph
    that is made are noted, for :func:`source_of`.

    Args:
        model: whose parameters are the weights.
        num_samples: in the part of the batch, if that is known.
    """

    def __init__(self, model: nn.Module, num_samples: int | None):
        self._samples = GradientSource("", num_samples)
        self._weights = {id(one): GradientSource(name, num_samples) for name, one in walk.named_parameters(model)}
        held = [one for module in walk.modules(model) for one in _tensors(vars(module).values())]
        # Kept, so that no other tensor gets their ids.
        self._constants = {id(one): one for one in (*walk.buffers(model), *held)}
        # By id. A source of None is that of constants.
        self._made: dict[int, tuple[weakref.ref[Tensor], GradientSource | None]] = {}

    def note(self, args: Iterable[Any], kwargs: dict[str, Any], result: Any) -> None:
        """Note what a function has returned, or has written to its first argument."""
        given = [*_tensors(args), *_tensors(kwargs.values())]
        made = given[:1] if result is None else [*_tensors((result,))]
        if not made:
            return
        # Views of what was written to may have no node that can be asked for.
        with DisableTorchFunctionSubclass(), suppress(RuntimeError):
            source = _together(map(self._of, given))
            for one in made:
                self._made[id(one)] = weakref.ref(one), source
                if source is not None and one.grad_fn is not None:
                    _notes(one.grad_fn)[_NOTE] = source

    def of(self, tensor: Tensor) -> GradientSource | None:
        """Of a tensor; None: it is constant."""
        with DisableTorchFunctionSubclass():
            return self._of(tensor)

    def _of(self, tensor: Tensor) -> GradientSource | None:
        if id(tensor) in self._weights:
            return self._weights[id(tensor)]
        made = self._made.get(id(tensor))
        if made is not None and made[0]() is tensor:
            own = made[1]
        elif id(tensor) in self._constants:
            return None
        else:
            made, own = None, self._samples
        node = tensor.grad_fn
        if node is None:
            return own
        if (noted := _notes(node).get(_NOTE)) is not None:
            return noted
        if isinstance(node, BackwardCFunction):  # it is called without a torch function
            source = self._of_function(node, own if made is not None else None)
            _notes(node)[_NOTE] = source
            return source
        return self._samples if own is None else own

    def _of_function(self, node: Any, own: GradientSource | None) -> GradientSource:
        """Of what an autograd function has returned; ``own``: as the functions that it has called tell, if they do."""
        following = [one for one, _ in node.next_functions]
        found = _together([own, *(self._of_edge(one) for one in following if one is not None)])
        # A tensor that needs no gradient may be of samples.
        return self._samples if found is None or (own is None and None in following) else found

    def _of_edge(self, node: Node) -> GradientSource:
        variable = getattr(node, "variable", None)
        known = _notes(node).get(_NOTE) if variable is None else self._weights.get(id(variable))
        return self._samples if known is None else known


def source_of(node: Node) -> GradientSource | None:
    """Of what a node of the graph has made, if that was followed."""
    noted = _notes(node).get(_NOTE)
    if noted is not None:
        return noted
    # What nothing has read since: an autograd function's.
    found = [_notes(one).get(_NOTE) for one, _ in node.next_functions if one is not None]
    return _together(found) if found and None not in found else None


def _notes(node: Node) -> dict[str, GradientSource]:
    """What is noted at a node, as long as it lives; torch declares it as a method."""
    notes: Any = node.metadata
    own: dict[str, GradientSource] = notes
    return own


def _together(sources: Iterable[GradientSource | None]) -> GradientSource | None:
    """Of what is made of several."""
    found = [one for one in sources if one is not None]
    return next((one for one in found if not one.weight), found[0] if found else None)


def _tensors(values: Iterable[Any], levels: int = _LEVELS) -> Iterator[Tensor]:
    """The tensors among values, and those of lists, tuples and dicts among them."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif levels and isinstance(value, list | tuple | dict):
            yield from _tensors(value.values() if isinstance(value, dict) else value, levels - 1)
