"""Find autograd functions of a model or script whose backward passes make something else of parts of a batch."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from inspect import unwrap
from types import CodeType, FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import Node, saved_tensors_hooks

from hybridpp.cluster import random_state, set_random_state
from hybridpp.code_owner import is_library_module
from hybridpp.data_parallel.hook_checks import GradientFactor
from hybridpp.data_parallel.part_trials import TOGETHER, GradientList, PartTrial, Replace
from hybridpp.data_parallel.sources import GradientSource, source_of
from hybridpp.nn.snapshot import Snapshot, preserved_buffer_values, preserved_modules
from hybridpp.nn.torch_private import REGISTERED_OPERATORS, function_of, storage_id

# A power of two, so that what follows the factor rounds alike.
_FACTOR = 2.0
# Of the gradient that is returned: less is the rounding of a format.
_TOLERANCE = 1e-5
# Of multiples, whose rounding in half precision may differ.
_ALIKE = 1e-2
# Names in the code of functions that wait for other ranks.
_COMMUNICATING = frozenset(
    {"dist", "distributed", "all_reduce", "all_gather", "all_gather_into_tensor", "reduce_scatter", "all_to_all"}
)
# Of what the attributes of a node hold.
_LEVELS = 2


class FunctionChecks:
    """Calls the backward passes of autograd functions once more, with gradients that are zero.

    What they return then they add themselves. It is right if it follows ``booster.gradient_scale``, which is tried too,
    or if each sample has its own, as a sum over samples is the same in parts. Where it goes to a scalar or a parameter,
    or is a mean over samples, it would count once for each part of a batch.

    What is made of other gradients must be the parts of one result, see :class:`PartTrial`: a backward pass need not be
    linear for activations (limits of elements), and may round (quantised gradients).

    What cannot be told is left alone: functions that run a backward pass inside, or communicate, or whose second call
    fails, and what they add if the script has read the factor elsewhere, where it may have kept it for them; of those
    that draw, all but what they add. Torch's own functions and this library's are not called again.

    Args:
        factor: that is tried.

    Attributes:
        found: why the pass is refused; empty: it is not.
    """

    def __init__(self, factor: GradientFactor):
        self._factor = factor
        self.found = ""

    @contextmanager
    def trying(self, roots: Iterable[Node]) -> Iterator[None]:
        """A context for a backward pass of one of several parts of a batch, which begins at these nodes."""
        tried = [(node, type(node)) for node in _functions_of_scripts(roots)]
        sources = [source_of(node) for node, _ in tried]
        for (node, kind), source in zip(tried, sources, strict=True):
            node.__class__ = self._on_trial(kind, source)
        try:
            yield
        finally:
            for node, kind in tried:  # not all were reached
                node.__class__ = kind

    def _on_trial(self, kind: Any, source: GradientSource | None) -> Any:
        """A class for one node of this class, whose call is tried; ``source``: of what it has made, if that is known.

        What the function has saved is read once for all calls: it can be read no second time where it is recomputed.
        """
        read: list[tuple[Tensor | None, ...]] = []
        # In their place, for one call.
        replaced: list[Callable[[Tensor], Tensor]] = []

        def saved(node: Any) -> tuple[Tensor | None, ...]:
            if not read:
                read.append(kind.saved_tensors.__get__(node))
            if not replaced:
                return read[0]
            return tuple(None if one is None else replaced[0](one) for one in read[0])

        def apply(node: Any, *gradients: Tensor | None) -> Any:
            held = dict(vars(node))
            graphs: list[None] = []
            try:
                with self._factor.inside(), _noting_graphs(graphs):
                    made = kind.apply(node, *gradients)
                if not graphs and not self.found:
                    call = _Calls(node, kind, held, replaced, _results(made))
                    self._try(call, gradients)
                    if source is not None and not self.found:
                        self._try_parts(call, gradients, source)
                return made
            finally:
                node.__class__ = kind

        return type(kind.__name__, (kind,), {"apply": apply, "saved_tensors": property(saved)})

    def _try(self, calls: "_Calls", gradients: Sequence[Tensor | None]) -> None:
        """Note a function that adds gradients of its own. Waits for the device."""
        with suppress(Exception):  # then it cannot be told
            zeros = [None if one is None else torch.zeros_like(one) for one in gradients]
            with self._factor.inside(1.0):
                added = calls.run(zeros)
            own = [index for index, one in enumerate(added) if _is_added(one, calls.made[index])]
            if not own or self._factor.was_read:
                return
            with self._factor.inside(_FACTOR):
                following = calls.run(zeros)
            left = [
                (index, one)
                for index in own
                if (one := added[index]) is not None and not _is_multiple(following[index], one, _FACTOR)
            ]
            if any(calls.is_of_whole(index) or calls.is_mean(index, one, zeros) for index, one in left):
                self.found = (
                    f"the backward pass of the autograd function {calls.name!r} adds a gradient of its own: it returns "
                    "one for gradients that are zero. It is not weighted as the criterion's loss is, and would count "
                    "once for every micro-batch of every replica. Multiply what it adds by booster.gradient_scale, "
                    "read in backward; or return that loss from the model, and add it in the criterion; or use "
                    "num_microbatches=1 and one replica."
                )

    def _try_parts(self, calls: "_Calls", gradients: GradientList, source: GradientSource) -> None:
        """Note a function that makes something else of parts of a batch. Waits for the device."""
        if source.num_samples == 1 and calls.keeps_sizes():  # more samples cannot be made of it
            return
        with suppress(Exception):  # then it cannot be told
            trial = PartTrial(calls.run, gradients, self._factor)
            found = trial.found(source, calls.of_weights(), keeps_samples=calls.keeps_tensors())
            if not found or calls.has_drawn:
                return
            where = f" on what is made of {source.weight}" if source.weight else ""
            way_out = (
                "Change each sample, or each element, for itself, and"
                if found == TOGETHER
                else "Let it be linear for what several samples share (weights, losses), and"
            )
            self.found = (
                f"the backward pass of the autograd function {calls.name!r}{where} is called for a part of the batch, "
                f"and {found}: its result depends on the numbers of micro-batches and replicas. {way_out} clip "
                "gradients of weights between backward and step (optimizer.clip_grad_by_norm); or use "
                "num_microbatches=1 and one replica."
            )


class _Calls:
    """Further calls of the backward pass of one node, which leave no traces.

    Args:
        node: of the graph.
        kind: its class.
        held: the attributes that it had before its own call.
        replaced: what is called for each tensor that it has saved, if there is one.
        made: what its own call has returned.

    Attributes:
        has_drawn: whether a call has drawn numbers.
    """

    def __init__(
        self,
        node: Any,
        kind: Any,
        held: dict[str, Any],
        replaced: list[Callable[[Tensor], Tensor]],
        made: Sequence[Tensor | None],
    ):
        self._node, self._kind, self._held, self._replaced = node, kind, held, replaced
        self.made, self.name = made, function_of(kind).__qualname__
        self.has_drawn = False
        # What was returned may be what was saved, and may be written to.
        self._returned = {storage_id(one) for one in made if one is not None}

    def run(self, gradients: GradientList, replace: Replace | None = None) -> list[Tensor | None]:
        """What it returns for other gradients: a list; ``replace`` is called for each tensor that it has saved."""
        state, device = vars(self._node), next(one.device for one in gradients if one is not None)
        left = dict(state)

        def own(one: Tensor) -> Tensor:
            one = one.clone() if storage_id(one) in self._returned else one
            return one if replace is None else replace(one)

        self._replaced.append(own)
        _put(state, {name: own(one) if isinstance(one, Tensor) else one for name, one in self._held.items()})
        try:
            with self._drawing(device), torch.no_grad(), _preserved(self._held.values()):
                return _results(self._kind.apply(self._node, *gradients))
        finally:
            self._replaced.clear()
            _put(state, left)

    @contextmanager
    def _drawing(self, device: torch.device) -> Iterator[None]:
        """Inside, it is noted whether numbers are drawn; the generators are restored after it."""
        before = random_state(device)
        try:
            yield
        finally:
            after = random_state(device)
            self.has_drawn |= any(
                one is not None and two is not None and not torch.equal(one, two)
                for one, two in zip(before, after, strict=True)
            )
            set_random_state(before, device)

    def is_of_whole(self, index: int) -> bool:
        """Whether a gradient is of something that samples share: a scalar or a parameter."""
        made = self.made[index]
        assert made is not None, "it is added"
        if made.numel() == 1 and made.dim() <= 1:
            return True
        return hasattr(self._inputs().get(index), "variable")

    def of_weights(self) -> set[int]:
        """The indices of the gradients that are of weights, or of what is made of weights alone."""
        found = set()
        for index, node in self._inputs().items():
            source = source_of(node)
            if isinstance(getattr(node, "variable", None), nn.Parameter) or (source is not None and source.weight):
                found.add(index)
        return found

    def keeps_tensors(self) -> bool:
        """Whether the function has kept tensors of its forward."""
        return bool(self._node.saved_tensors) or any(isinstance(one, Tensor) for one in self._held.values())

    def keeps_sizes(self) -> bool:
        """Whether the function has kept a number that may be that of one sample."""
        held = (one if isinstance(one, tuple | list) else (one,) for one in self._held.values())
        return any(type(number) is int and number == 1 for one in held for number in one)

    def _inputs(self) -> dict[int, Node]:
        """The nodes that gradients go to, by index, if that can be told."""
        needed = [one for one, is_needed in enumerate(self._node.needs_input_grad) if is_needed]
        edges = [one for one, _ in self._node.next_functions if one is not None]
        return dict(zip(needed, edges, strict=True)) if len(needed) == len(edges) else {}

    def is_mean(self, index: int, added: Tensor, zeros: Sequence[Tensor | None]) -> bool:
        """Whether what is added is divided by the number of samples: in half of them, each gets the double."""
        rows = len(added)
        half = rows // 2

        def first(one: Tensor) -> Tensor:
            return one[:half] if one.dim() and len(one) == rows else one

        found = self.run([None if one is None else first(one) for one in zeros], first)[index]
        return half > 0 and _is_multiple(found, added[:half], rows / half)


@contextmanager
def _preserved(values: Iterable[Any]) -> Iterator[None]:
    """Undo, afterwards, what happens inside to containers, objects and modules."""
    held = list(values)
    before = Snapshot.reachable_from([one for one in held if not isinstance(one, Tensor | nn.Module)], _LEVELS)
    with ExitStack() as stack:
        stack.callback(before.restore)
        for module in (one for one in held if isinstance(one, nn.Module)):
            stack.enter_context(preserved_modules(module))
            stack.enter_context(preserved_buffer_values(module))
        yield


def _put(state: dict[str, Any], held: dict[str, Any]) -> None:
    state.clear()
    state.update(held)


def _results(made: Any) -> list[Tensor | None]:
    """What a backward pass has returned, as a list."""
    return list(made) if isinstance(made, tuple | list) else [made]


def _is_added(added: Tensor | None, made: Tensor | None) -> bool:
    """Whether a gradient for zeros is one, beside the gradient that was returned."""
    if added is None or made is None or added.layout is not torch.strided or not added.numel():
        return False
    largest = float(added.abs().max())
    return 0 < largest < float("inf") and largest > _TOLERANCE * float(made.abs().max())


def _is_multiple(multiple: Tensor | None, added: Tensor, factor: float) -> bool:
    """Whether a gradient is this multiple of another."""
    if multiple is None or multiple.shape != added.shape:
        return False
    expected = added.double() * factor
    return bool((multiple.double() - expected).abs().max() <= _ALIKE * expected.abs().max())


@contextmanager
def _noting_graphs(found: list[None]) -> Iterator[None]:
    """Inside, note in ``found`` that a graph was made, of which a backward pass inside would be."""

    def pack(tensor: Tensor) -> Tensor:
        found.append(None)
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        yield


def _functions_of_scripts(roots: Iterable[Node]) -> list[Any]:
    """The nodes of autograd functions in a graph that may be called again, but those of torch and this library."""
    # The nodes themselves, so that no id is used twice.
    seen: dict[int, Node] = {}
    waiting = list(roots)
    found: list[Any] = []
    while waiting:
        node = waiting.pop()
        if id(node) in seen:
            continue
        seen[id(node)] = node
        if isinstance(node, BackwardCFunction) and _may_be_called_again(function_of(type(node))):
            found.append(node)
        waiting += [one for one, _ in node.next_functions if one is not None]
    return found


def _may_be_called_again(function: Any) -> bool:
    module = str(function.__module__)
    if is_library_module(module) and not module.startswith(REGISTERED_OPERATORS):
        return False
    names = {name for code in _codes(function.backward) for name in code.co_names}
    return not any("backward" in name or name in _COMMUNICATING for name in names)


def _codes(function: Any) -> Iterator[CodeType]:
    """The code of a function, of those inside, and of those of its module that it names."""
    function = unwrap(function)
    if not isinstance(function, FunctionType):
        return
    own = list(_with_inner(function.__code__))
    yield from own
    for name in {name for code in own for name in code.co_names}:
        other = function.__globals__.get(name)
        if isinstance(other, FunctionType):
            yield from _with_inner(other.__code__)


def _with_inner(code: CodeType) -> Iterator[CodeType]:
    yield code
    for one in code.co_consts:
        if isinstance(one, CodeType):
            yield from _with_inner(one)
