"""Whether a loss that a script made of a model's outputs puts samples together: its graph is asked."""

import math
import re
import weakref
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeAlias, cast

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

from hybridpp.cluster import get_dist_logger
from hybridpp.nn.torch_private import INPUT_METADATA
from hybridpp.pipeline.loss_graph import is_of_parameters
from hybridpp.pipeline.loss_trace import LossTrace
from hybridpp.pipeline.sample_dims import SampleDim, guessed_samples

_KEY = "hybridpp.output"
# Nodes between a loss and the outputs that tell how it is made; and all that are looked at.
_MAX_TOLD, _MAX_NODES = 100, 20_000
# The most elements of outputs whose second derivatives are computed: they take some times the memory.
MAX_ELEMENTS = 2**27
# Samples whose couplings are followed.
_MAX_FOLLOWED = 8
# The part of the largest second derivative that rounding may be.
_TOLERANCE = 1e-6
# Functions of which second derivatives are 0 or none, though they are not linear, by the names of their nodes: of each
# element; of elements along a dimension, or of all; of pairs of rows.
_BENT = re.compile(
    r"(Relu|LeakyRelu|Elu|Threshold|Hardtanh|Clamp|ClampMin|ClampMax|Abs|Maximum|Minimum|LinalgVectorNorm|Norm)Backward\d"
)
_CHOOSING = re.compile(r"(Topk|Sort|Max|Min|Median|Nanmedian|Kthvalue|Mode|Amax|Amin|Cummax|Cummin)Backward\d")
_OF_PAIRS = re.compile(r"_?(Euclidean|Cdist|Pdist)\w*Backward\d")
_MAX_BENT = 16
# Elements of an argument that are asked of which samples they are made; and of these, that link no further ones.
_MAX_LINKED, _MAX_IDLE = 64, 4
# Outputs of a model that are made of each other.
_MAX_GROUPS = 4

_Edge: TypeAlias = tuple[Node, int]
_Sample: TypeAlias = tuple[int, int]
"""Of a call of so many samples, its index. Calls of as many samples are about the same ones, as of two views."""


class _Output(NamedTuple):
    """What is noted at the node of the graph that made a model's output.

    Attributes:
        position: among the outputs of the call.
        num_samples: of the call.
        samples: where the output holds them; None: that is not known.
        why: how the model put samples together, as far as known; "": it did not.
        tensor: the output, while the script holds it.
        given: the shapes of what the model was called with.
    """

    position: int
    num_samples: int
    samples: SampleDim | None
    why: str
    tensor: "weakref.ref[Tensor]"
    given: Sequence[tuple[int, ...]] = ()


def num_samples_of(given: Iterable[Tensor]) -> int:
    """The number of samples that a model is called with: the most usual first size of its tensors; 0: it has none."""
    sizes = Counter(tensor.shape[0] for tensor in given if tensor.dim())
    return max(sizes, key=lambda size: sizes[size], default=0)


def mark_outputs(
    outputs: Sequence[Tensor],
    num_samples: int,
    trace: LossTrace | None = None,
    given: Sequence[tuple[int, ...]] = (),
) -> None:
    """Note at the graph of a model's outputs that a call returned them; :class:`LossSection` finds it there.

    Args:
        outputs: of a call of a model.
        num_samples: of the call; 0: that is not known.
        trace: that has watched the call; None: nothing has.
        given: the shapes of what the model was called with.
    """
    guessed = guessed_samples([one.shape for one in outputs], num_samples) if num_samples else [None] * len(outputs)
    for position, (tensor, guess) in enumerate(zip(outputs, guessed, strict=True)):
        if tensor.grad_fn is None:
            continue
        is_learned = is_of_parameters(tensor.grad_fn) or (trace is not None and trace.is_of_parameters(tensor))
        samples = None if is_learned else (None if trace is None else trace.samples_of(tensor)) or guess
        why = "" if trace is None else trace.coupling_of(tensor)
        output = _Output(position, num_samples, samples if tensor.dim() else None, why, weakref.ref(tensor), given)
        edge = get_gradient_edge(tensor)
        _notes(edge.node).setdefault(_KEY, {})[edge.output_nr] = output


def outputs_at(node: Node) -> list[_Output]:
    """The outputs of models that a node made, as far as they are marked."""
    return list(_notes(node).get(_KEY, {}).values())


class LossSection:
    """The part of a loss's graph between the loss and outputs of models that are marked.

    Attributes:
        signature: equal for losses that are made of the same outputs by the same functions, as far as they are looked
            at; from 1 on.
        positions: of these outputs, among those of their calls.
        shapes: of these outputs.
        given: the shapes of what models were called with there.
        nums_samples: of these calls.
        is_of_own_loss: whether some output is a number, as a loss that the model makes.
    """

    def __init__(self, loss: Tensor):
        self._outputs: dict[_Edge, _Output] = {}
        self._bent: list[Node] = []
        self._of_classes: list[Node] = []
        self._is_own = False
        names = self._walk(loss, _MAX_TOLD)
        self.positions = sorted({one.position for one in self._outputs.values()})
        self.shapes = [tuple(getattr(node, INPUT_METADATA)[number].shape) for node, number in self._outputs]
        self.given = {shape for one in self._outputs.values() for shape in one.given}
        self.nums_samples = {one.num_samples for one in self._outputs.values()}
        self.is_of_own_loss = () in self.shapes
        self.signature = 1 + (zlib.crc32(repr((names, self.positions)).encode()) & 0xFFFFFF)

    def _walk(self, loss: Tensor, limit: int) -> list[str]:
        self._outputs, self._bent, self._of_classes, self._is_own = {}, [], [], False
        names: list[str] = []
        start = get_gradient_edge(loss)
        pending: list[_Edge] = [(start.node, start.output_nr)]
        seen = {pending[0][0]}
        for node, number in pending:
            marked = _notes(node).get(_KEY)
            if marked is not None:
                if number in marked:
                    self._outputs[node, number] = marked[number]
                # Of one function's other results, nothing is known.
                continue
            if len(names) == limit:
                break
            names.append(node.name())
            self._is_own |= isinstance(node, BackwardCFunction)
            if names[-1].startswith("NllLossBackward"):
                self._of_classes.append(node)
            if any(kind.fullmatch(names[-1]) for kind in (_BENT, _CHOOSING, _OF_PAIRS)):
                self._bent.append(node)
            for following, which in node.next_functions:
                if following is None or (following in seen and _KEY not in _notes(following)):
                    continue
                seen.add(following)
                pending.append((following, which))
        return names

    def coupling(self, loss: Tensor, *, is_of_one_item: bool | None) -> str:
        """How a loss puts samples together, as far as that shows; "": it does not.

        The loss of a sample, or of some that belong together, has no second derivative with respect to outputs of it
        and of another one. Where second derivatives are 0 or none (limits, absolute values, choices by order, distances
        of pairs), the outputs are asked for of which such a function's arguments are made. This takes two backward
        passes or more through what the script made of the outputs.

        Args:
            loss: that the section is of.
            is_of_one_item: whether it is a mean over one item, which may be all samples; None: that is not known.
        """
        self._walk(loss, _MAX_NODES)
        why = next((one.why for one in self._outputs.values() if one.why), "")
        if why:
            return why
        # An autograd function of the script's may be unable to go back twice.
        groups = [] if self._is_own else self._by_order()
        if not groups or sum(_numel(edge) for ends in groups for edge in ends) > MAX_ELEMENTS:
            return ""
        marks = [mark for ends in groups for mark in ends.values()]
        kept = [(one, one.grad) for mark in marks if (one := mark.tensor()) is not None and one.retains_grad]
        least = 3 if is_of_one_item is None else 2
        try:
            for number, ends in enumerate(groups if not is_of_one_item else ()):
                # What the model makes of an output, and returns too, is the model's.
                with _cut({node for before in groups[:number] for node, _ in before}):
                    if why := self._coupling(loss, ends, least):
                        return why
            are_samples = not is_of_one_item and any(_are_samples(node, least) for node in self._of_classes)
            return "classes that are the samples themselves" if are_samples else ""
        except torch.OutOfMemoryError:  # the pass itself may need less
            get_dist_logger().warning(
                "out of memory while a loss of booster.backward was looked at, the first time that it is made in this "
                "way: whether it puts samples together is not known. Training goes on."
            )
            return ""
        except (RuntimeError, NotImplementedError):  # a pass through what the script made fails
            return ""
        finally:
            for tensor, gradient in kept:
                tensor.grad = gradient

    def _coupling(self, loss: Tensor, ends: dict[_Edge, _Output], least: int) -> str:
        """How it puts at least so many samples together, and all that it depends on."""
        edges, outputs = [GradientEdge(*one) for one in ends], list(ends.values())
        with torch.enable_grad():
            gradients = torch.autograd.grad(loss, edges, create_graph=True, allow_unused=True)
            rows = _rows(gradients, outputs)
        active = _nonzero(rows, 0.0)
        if len(active) >= least and _are_coupled(rows, active, edges, outputs):
            return "the gradient of a sample's outputs depends on all other samples"
        return _bent_together(self._bent[:_MAX_BENT], loss, ends, active, least)

    def _by_order(self) -> list[dict[_Edge, _Output]]:
        """The outputs with samples: those of which none of the others is made, then those of which these are made."""
        left = {edge: one for edge, one in self._outputs.items() if one.samples is not None}
        groups: list[dict[_Edge, _Output]] = []
        while left and len(groups) < _MAX_GROUPS:
            groups.append(self._last(dict(left)))
            left = {edge: one for edge, one in left.items() if edge not in groups[-1]}
        return groups

    def _last(self, ends: dict[_Edge, _Output]) -> dict[_Edge, _Output]:
        """Those of which none of the others is made."""
        nodes = {node for node, _ in ends}
        for edge in [*ends] if len(nodes) > 1 else ():
            seen, pending = {edge[0]}, [edge[0]]
            for node in pending:  # which grows
                if len(seen) > _MAX_NODES:
                    break
                following = {one for one, _ in node.next_functions if one is not None} - seen
                seen |= following
                pending += following
                for other in [one for one in ends if one[0] in following]:
                    del ends[other]
        return ends


def _are_samples(node: Node, least: int) -> bool:
    """Whether the classes of a loss are its rows, as of similarities with keys that may have no graph."""
    target, scores = getattr(node, "_saved_target", None), getattr(node, "_saved_self", None)
    if target is None or scores is None or target.dim() != 1 or not least <= len(target) == scores.shape[1]:
        return False
    return torch.equal(target, torch.arange(len(target), device=target.device))


@contextmanager
def _cut(nodes: Iterable[Node]) -> Iterator[None]:
    """Inside, no gradient passes these nodes."""
    zero: Any = lambda gradients: tuple(None if one is None else torch.zeros_like(one) for one in gradients)  # noqa: E731
    handles = [node.register_prehook(zero) for node in nodes]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _notes(node: Node) -> dict[str, Any]:
    """What is noted at a node of the graph, as long as it lives; torch declares it as a method."""
    notes: Any = node.metadata
    return cast(dict[str, Any], notes)


def _numel(edge: _Edge) -> int:
    node, number = edge
    return math.prod(getattr(node, INPUT_METADATA)[number].shape)


def _are_coupled(
    rows: Sequence[tuple[int, Tensor]], active: set[_Sample], edges: Sequence[GradientEdge], outputs: Sequence[_Output]
) -> bool:
    """Whether second derivatives couple all samples whose outputs a loss depends on, given its gradients by sample."""
    generator = torch.Generator().manual_seed(0)
    reached, followed = {min(active, default=(0, 0))}, set[_Sample]()
    while reached < active and len(followed) < _MAX_FOLLOWED and (left := reached - followed):
        number, index = sample = min(left)
        followed.add(sample)
        own = [of[index] for number_of, of in rows if number_of == number and of.requires_grad]
        if not own:
            continue
        # Of weights that are no constant ones, since gradients of logits add up to 0.
        chosen = [(one * torch.randn(one.shape, generator=generator).to(one)).sum() for one in own]
        try:
            found = torch.autograd.grad(chosen, edges, retain_graph=True, allow_unused=True)
        except torch.OutOfMemoryError:
            raise
        except (RuntimeError, NotImplementedError):  # it has no second derivative
            return False
        reached |= active & _nonzero(_rows(found, outputs), _TOLERANCE)
    return reached >= active


def _bent_together(
    nodes: Sequence[Node], loss: Tensor, ends: dict[_Edge, _Output], active: set[_Sample], least: int
) -> str:
    """How one of these functions puts samples together, at least so many and all that are active; "": none does.

    What such a function takes together (one element; those along its dimension; pairs) is made of the outputs of the
    samples that a gradient there reaches. Comparisons of a few samples may link all of them.
    """
    compared: list[tuple[_Edge, str]] = []
    for node in nodes:
        if not any(edge[0] is not None for edge in node.next_functions):
            continue
        name = node.name()
        what = name.partition("Backward")[0].strip("_").lower()
        if _OF_PAIRS.fullmatch(name):
            one, several = _pairs(node, loss)
            if len(_reached((node, 0), one, ends)) > 1 and _are_all(_reached((node, 0), several, ends), active, least):
                return f"it has the distances of all samples to each other ({what})"
            continue
        for edge in cast("Sequence[_Edge]", [one for one in node.next_functions if one[0] is not None]):
            weights = _zeros(edge)
            if _CHOOSING.fullmatch(name):
                # Unlike ones, as gradients of logits add up to 0.
                lane = _lane(weights, node)
                lane.copy_(torch.linspace(1, 2, lane.numel()).view(lane.shape))
                text = f"it chooses among all samples ({what})"
            elif weights.numel() == 1 and getattr(node, "_saved_max", None) is not None:
                continue  # a guard against a loss that is too large
            else:
                weights.view(-1)[:1] = 1.0
                text = f"a number of all samples together is limited, or its sign is taken off ({what})"
            reached = _reached(edge, weights, ends)
            if _are_all(reached, active, least):
                return text
            if _BENT.fullmatch(name) and len(reached) > 1:
                compared.append((edge, what))
    for edge, what in compared:
        if _are_linked(edge, ends, active, least):
            return f"samples are compared with others that are themselves compared with further ones ({what})"
    return ""


def _are_linked(edge: _Edge, ends: dict[_Edge, _Output], active: set[_Sample], least: int) -> bool:
    """Whether all samples are linked by elements that are made of some of them: neighbours are, pairs are not."""
    argument = _zeros(edge)
    for dim in range(argument.dim()):
        reached: set[_Sample] = set()
        num_idle = 0
        for index in range(min(argument.shape[dim], _MAX_LINKED)):
            weights = torch.zeros_like(argument)
            weights[tuple(index if one == dim else 0 for one in range(argument.dim()))] = 1.0
            found = _reached(edge, weights, ends)
            if reached and (found <= reached or not found & reached):
                num_idle += 1
            else:
                reached |= found
            if num_idle == _MAX_IDLE:
                break
            if _are_all(reached, active, least):
                return True
    return False


def _are_all(reached: set[_Sample], active: set[_Sample], least: int) -> bool:
    return len(reached) >= least and reached >= active


def _zeros(edge: _Edge) -> Tensor:
    """Like the tensor whose gradient comes in at an edge."""
    node, number = edge
    like = getattr(node, INPUT_METADATA)[number]
    return torch.zeros(tuple(like.shape), dtype=like.dtype, device=like.device)


def _lane(argument: Tensor, node: Node) -> Tensor:
    """The first elements of an argument that a function of it takes together: along its dimension, or all."""
    dims = getattr(node, "_saved_dim", None)
    dims = [dims] if isinstance(dims, int) else list(dims or range(argument.dim()))
    # Torch saves a negative dimension as an unsigned number.
    own = {(dim - 2**64 if dim >= 2**63 else dim) % max(argument.dim(), 1) for dim in dims}
    return argument[tuple(slice(None) if dim in own else slice(0, 1) for dim in range(argument.dim()))]


def _pairs(node: Node, loss: Tensor) -> tuple[Tensor, Tensor]:
    """Of distances of pairs of rows: one that the loss depends on, and all of its row and of its column."""
    (gradient,) = torch.autograd.grad(loss, [GradientEdge(node, 0)], retain_graph=True, allow_unused=True)
    if gradient is None or not gradient.count_nonzero():
        return _zeros((node, 0)), _zeros((node, 0))
    used = (gradient != 0).to(gradient.dtype)
    one, several = torch.zeros_like(used), torch.zeros_like(used)
    last = [int(index) for index in used.nonzero()[-1]]
    if len(last) == 1:  # of all pairs of one matrix's rows
        one[last[0]] = 1.0
        return one, used
    *position, _ = last
    column = int(used[tuple(position)].argmax())  # the first one: the last may be of a row to itself
    one[tuple(position)][column] = 1.0
    several[tuple(position)] = used[tuple(position)]
    several[tuple(position[:-1])][..., column] += used[tuple(position[:-1])][..., column]
    return one, several


def _reached(edge: _Edge, weights: Tensor, ends: dict[_Edge, _Output]) -> set[_Sample]:
    """The samples of whose outputs these elements at an edge are made."""
    outputs = list(ends.values())
    found = torch.autograd.grad(
        [GradientEdge(*edge)], [GradientEdge(*one) for one in ends], [weights], retain_graph=True, allow_unused=True
    )
    return _nonzero(_rows(found, outputs), 0.0)


def _rows(gradients: Sequence[Tensor | None], outputs: Sequence[_Output]) -> list[tuple[int, Tensor]]:
    """The gradients of outputs by sample, each with the number of samples of its call."""
    pairs = zip(gradients, outputs, strict=True)
    return [(one.num_samples, _by_sample(of, one)) for of, one in pairs if of is not None]


def _by_sample(gradient: Tensor, output: _Output) -> Tensor:
    """A row for each sample of an output."""
    assert output.samples is not None
    dim, rows, _, order = output.samples
    rows_of = gradient.movedim(dim, 0).reshape(
        gradient.shape[dim] // (output.num_samples * rows), output.num_samples, -1
    )
    by_sample = rows_of.transpose(0, 1).flatten(1)
    return by_sample[torch.tensor(order).argsort()] if len(order) == output.num_samples else by_sample


def _nonzero(rows: Sequence[tuple[int, Tensor]], tolerance: float) -> set[_Sample]:
    """The samples whose rows are not 0, nor next to it compared with the largest of all."""
    sizes = [(number, one.detach().double().nan_to_num(0.0, 0.0, 0.0).abs().amax(1).tolist()) for number, one in rows]
    limit = tolerance * max((size for _, of in sizes for size in of), default=0.0)
    return {(number, index) for number, of in sizes for index, size in enumerate(of) if size > limit}
