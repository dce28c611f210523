"""What comes into a stage for a micro-batch and leaves it: messages between stages, and inputs of the batch.

Messages have their two ends in autograd here, and what has come is held until it is used. Of the inputs, what the stage
reads is copied to its device ahead of use, the rest not at all.
"""

from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

from hybridpp.cluster import Group, Work, resolved
from hybridpp.errors import PartitionError, ScheduleError
from hybridpp.nn.deferred_tensor import deferred
from hybridpp.nn.torch_private import pytree
from hybridpp.pipeline.batch import Microbatch
from hybridpp.pipeline.side_stream import CudaSideStream, SideStream, page_locked
from hybridpp.pipeline.stage import TensorMeta
from hybridpp.schedule import Action, ActionKind

K = TypeVar("K")
V = TypeVar("V")
_Path = tuple[Any, ...]
ForwardKey = tuple[int, int]
"""A forward of a step: its stage and micro-batch."""

# By the kind of a receive, the action that uses what arrives. By the kind of a message, from this stage to the peer's.
_USER = {ActionKind.RECEIVE_ACTIVATION: ActionKind.FORWARD, ActionKind.RECEIVE_GRADIENT: ActionKind.BACKWARD}
_PEER = {
    ActionKind.RECEIVE_ACTIVATION: -1,
    ActionKind.SEND_ACTIVATION: 1,
    ActionKind.RECEIVE_GRADIENT: 1,
    ActionKind.SEND_GRADIENT: -1,
}


class _Gradients:
    """The gradients of received values, once the stage's backward pass is expected to bring them."""

    def __init__(self) -> None:
        self.is_expected = False
        self.found: list[Tensor | None] = []


class _StageInputFunction(torch.autograd.Function):
    """Makes received tensors the results of an operation, so that the model may write to them in place.

    Autograd forbids in-place writes to a leaf that requires a gradient, and a stage may begin with one (an in-place
    activation). The tensors are passed in a list, which autograd does not inspect, so the results are not views.
    """

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, tensors: list[Tensor], gradients: "_Gradients") -> tuple[Tensor, ...]:
        ctx.gradients = gradients
        ctx.set_materialize_grads(False)
        return tuple(tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[None, None, None]:
        if not ctx.gradients.is_expected:
            raise PartitionError(
                "a backward pass inside the forward goes back to what this stage received: autograd has the graph of "
                "one stage only. Use pp_size=1, or run such a pass inside one block, on detached inputs."
            )
        ctx.gradients.found.extend(gradients)
        return None, None, None


class StageInput:
    """The values that a stage received for one micro-batch; it keeps their gradients, not the values."""

    def __init__(self, tensors: list[Tensor], specs: Sequence[TensorMeta], training: bool):
        self._specs = [spec for spec in specs if training and spec.requires_grad]
        self._device = tensors[0].device if tensors else torch.device("cpu")
        self._gradients = _Gradients()
        tracked = [tensor for tensor, spec in zip(tensors, specs, strict=True) if training and spec.requires_grad]
        if tracked:
            anchor = torch.zeros((), requires_grad=True)
            tracked = list(_StageInputFunction.apply(anchor, tracked, self._gradients))  # type: ignore[no-untyped-call]  # torch
        ready = iter(tracked)
        self._values = [
            next(ready) if training and spec.requires_grad else tensor
            for tensor, spec in zip(tensors, specs, strict=True)
        ]

    def take_values(self) -> list[Tensor]:
        """The tensors for the model, in the order of the specs; call it once. Autograd keeps what it needs of them."""
        values, self._values = self._values, []
        return values

    def expect_gradients(self) -> None:
        """Announce the stage's backward pass: no other may reach the received values."""
        self._gradients.is_expected = True

    def gradients(self) -> list[Tensor]:
        """The gradients of the differentiable values, after the backward pass; zeros for values without an effect."""
        found = self._gradients.found or [None] * len(self._specs)
        return [
            torch.zeros(spec.shape, dtype=spec.dtype, device=self._device) if gradient is None else gradient
            for gradient, spec in zip(found, self._specs, strict=True)
        ]


class StageOutput:
    """The values that a stage sent for one micro-batch; it keeps their autograd edges, not the values."""

    def __init__(self, tensors: list[Tensor], specs: Sequence[TensorMeta]):
        # The gradient of a value that was traced as differentiable but is not (a unit under no_grad) is dropped.
        self._edges: list[GradientEdge | None] = [
            get_gradient_edge(tensor) if tensor.requires_grad else None
            for tensor, spec in zip(tensors, specs, strict=True)
            if spec.requires_grad
        ]

    @property
    def nodes(self) -> list[Node]:
        """Where the stage's backward pass begins."""
        return [edge.node for edge in self._edges if edge is not None]

    def backward(self, gradients: list[Tensor]) -> None:
        """Run the stage's backward pass, given a gradient for each value that was traced as differentiable."""
        pairs = [(edge, grad) for edge, grad in zip(self._edges, gradients, strict=True) if edge is not None]
        if pairs:
            torch.autograd.backward([edge for edge, _ in pairs], [grad for _, grad in pairs])


class RecvHandle:
    """Tensors that this rank receives from another rank, or gets from another stage on the same rank."""

    __slots__ = ("_tensors", "_works")

    def __init__(self, tensors: list[Tensor], works: Sequence[Work] = ()):
        self._tensors = tensors
        self._works = works

    def wait(self) -> list[Tensor]:
        """The tensors, after they have arrived."""
        for work in self._works:
            work.wait()
        self._works = ()
        return self._tensors


class SendHandle:
    """Tensors that this rank sends, which must stay alive until they have been sent."""

    __slots__ = ("_tensors", "_works")

    def __init__(self, tensors: list[Tensor], works: list[Work]):
        self._tensors = tensors
        self._works = works

    def wait(self) -> None:
        """Wait until the tensors are sent, then release them. Blocks until the peer has posted the receive."""
        for work in self._works:
            work.wait()
        self._tensors, self._works = [], []


class Transport:
    """Sends and receives lists of tensors whose shapes both sides know.

    Messages between two ranks arrive in the order in which they are sent, activations and gradients alike, so both
    ranks must start them in one order (:func:`~hybridpp.schedule.lower`).

    Args:
        group: the pipeline's ranks.
        device: of received tensors.
    """

    def __init__(self, group: Group, device: torch.device):
        self.rank = group.rank
        self._group, self._device = group, device

    def send(self, tensors: Sequence[Tensor], peer: int) -> SendHandle:
        """Start to send to rank ``peer``."""
        # Backends send contiguous memory only, as it is.
        dense = [resolved(tensor.detach()).contiguous() for tensor in tensors]
        return SendHandle(dense, [self._group.send(tensor, peer) for tensor in dense])

    def receive(self, specs: Sequence[TensorMeta], peer: int) -> RecvHandle:
        """Start to receive from rank ``peer``."""
        tensors = [torch.empty(spec.shape, dtype=spec.dtype, device=self._device) for spec in specs]
        return RecvHandle(tensors, [self._group.receive(tensor, peer) for tensor in tensors])


class StageMessages:
    """The activations and gradients of one rank's stages in a step, from the action that makes them to their use.

    They are held under the action that will use them, so none outlives its use. Stages of one rank hand over without a
    message.

    Args:
        transport: to the other ranks.
        placement: the rank of every stage, as an index into the pipeline's group.
    """

    def __init__(self, transport: Transport, placement: Sequence[int]):
        self._transport, self._placement = transport, placement
        self._arriving: dict[Action, RecvHandle] = {}
        self._leaving: dict[Action, list[Tensor]] = {}
        self._sent: dict[Action, SendHandle] = {}

    def receive(self, action: Action, specs: Sequence[TensorMeta]) -> None:
        """Start a receive action."""
        peer = self._placement[action.stage + _PEER[action.kind]]
        self._arriving[action._replace(kind=_USER[action.kind])] = self._transport.receive(specs, peer)

    def send(self, action: Action) -> None:
        """Start a send action, of what the stage has passed on."""
        peer = self._placement[action.stage + _PEER[action.kind]]
        tensors = take_held(self._leaving, action)
        self._sent[action] = self._transport.send(tensors, peer)

    def take(self, action: Action) -> list[Tensor]:
        """What has come for a forward or a backward."""
        return take_held(self._arriving, action).wait()

    def pass_activations(self, action: Action, tensors: list[Tensor]) -> None:
        """Pass the results of a forward on to the next stage."""
        if self._is_here(action.stage + 1):
            following = action._replace(stage=action.stage + 1)
            self._arriving[following] = RecvHandle([tensor.detach() for tensor in tensors])
        else:
            self._leaving[action._replace(kind=ActionKind.SEND_ACTIVATION)] = tensors

    def pass_gradients(self, action: Action, gradients: list[Tensor]) -> None:
        """Pass the gradients of a stage's inputs, of a backward or an input gradient, on to the previous stage."""
        if self._is_here(action.stage - 1):
            before = Action(action.stage - 1, ActionKind.BACKWARD, action.microbatch)
            self._arriving[before] = RecvHandle(gradients)
        else:
            self._leaving[action._replace(kind=ActionKind.SEND_GRADIENT)] = gradients

    def _is_here(self, stage: int) -> bool:
        return 0 <= stage < len(self._placement) and self._placement[stage] == self._transport.rank

    def finish_send(self, action: Action) -> None:
        """Release sent tensors, whose receive the peer has posted."""
        self._sent.pop(action).wait()

    def finish(self) -> list[Action]:
        """Wait for the remaining sends; returns the actions that lack, whose tensors are still held."""
        for sent in self._sent.values():
            sent.wait()
        return [*self._arriving, *self._leaving]


def take_held(held: dict[K, V], key: K) -> V:
    """Take what is held for an action.

    Raises:
        ScheduleError: nothing is.
    """
    if key not in held:
        raise ScheduleError(
            f"{key} runs before its inputs exist, or a second time. Check the program with check_program."
        )
    return held.pop(key)


class InputCopies:
    """Copies inputs to one device, over all steps of one rank.

    Which inputs a stage reads is seen in its first micro-batches. All are deferred copies there, made by the first
    operation that needs their values. Whatever was read once is copied ahead of use from then on, so nothing can be
    missing.

    Args:
        device: of the copies.
        side: the stream on which inputs are copied ahead; None: they are copied when they are needed. By default a CUDA
            device has one.
    """

    def __init__(self, device: torch.device, side: SideStream | None = None):
        self.device = device
        self.side = CudaSideStream(device) if side is None and device.type == "cuda" else side
        self._read: dict[tuple[int, bool], set[_Path]] = {}

    def read_by(self, stage: int, training: bool) -> set[_Path]:
        """The places in a batch that a stage has read, in training or in evaluation; added to when more are read."""
        return self._read.setdefault((stage, training), set())


class _Copied(NamedTuple):
    inputs: Any
    tensors: list[Tensor]
    mark: Any


class StepInputs:
    """The inputs of one step's micro-batches.

    Args:
        copies: of this rank.
        microbatches: of the step.
        training: whether the step trains.
        is_cut: whether the model has several stages; if not, its stage reads all inputs.
    """

    def __init__(self, copies: InputCopies, microbatches: Sequence[Microbatch], training: bool, is_cut: bool):
        self._copies = copies
        self._microbatches = microbatches
        self._training = training
        self._is_cut = is_cut
        self._next: dict[ForwardKey, ForwardKey] = {}
        self._ahead: dict[ForwardKey, _Copied] = {}

    def expect(self, forwards: Sequence[ForwardKey]) -> None:
        """Set the forwards of this rank, in order."""
        self._next = dict(pairwise(forwards))

    def take(self, stage: int, microbatch: int) -> Any:
        """The inputs of a forward that begins now; those of the next one are copied meanwhile."""
        key = stage, microbatch
        copied = self._ahead.pop(key, None) or self._copy(key)
        side, following = self._copies.side, self._next.get(key)
        if side is not None:
            side.hand_over(copied.mark, copied.tensors)
            if following is not None:
                self._ahead[following] = self._copy(following)
        return copied.inputs

    def _copy(self, key: ForwardKey) -> _Copied:
        stage, microbatch = key
        device, side = self._copies.device, self._copies.side
        read = self._copies.read_by(stage, self._training)
        inputs = self._microbatches[microbatch].inputs
        tensors: list[Tensor] = []

        def copy(path: _Path, leaf: Tensor) -> Tensor:
            if self._is_cut and path not in read and _is_deferrable(leaf):
                make = partial(self._read_late, read, path, leaf)
                return deferred(leaf, make, dtype=leaf.dtype, device=device)
            tensors.append(copy_to(leaf, device))
            return tensors[-1]

        if side is None:
            return _Copied(_map_tensors(inputs, copy), tensors, None)
        if any(leaf.device.type != "cpu" for leaf in pytree.tree_leaves(inputs) if isinstance(leaf, Tensor)):
            side.wait_for_current()
        with side.active():
            found = _map_tensors(inputs, copy)
        return _Copied(found, tensors, side.mark())

    def _read_late(self, read: set[_Path], path: _Path, leaf: Tensor) -> Tensor:
        read.add(path)
        return copy_to(leaf, self._copies.device)


def copy_to(leaf: Tensor, device: torch.device) -> Tensor:
    """A copy on ``device``. The host does not wait: what a device copies from host memory is page-locked first."""
    if device.type == "cuda" and leaf.device.type == "cpu":
        leaf = page_locked(leaf)
    # A copy even on the same device: parts of one tensor share a version counter, so a model that writes to its inputs
    # would break the backward passes of earlier micro-batches.
    return leaf.to(device, non_blocking=True, copy=True)


def _is_deferrable(leaf: Tensor) -> bool:
    plain = type(leaf) is Tensor and leaf.layout is torch.strided and not leaf.is_nested
    return plain and not leaf.requires_grad and not leaf.is_quantized and not leaf.is_conj() and not leaf.is_neg()


def _map_tensors(tree: Any, function: Callable[[_Path, Tensor], Tensor], path: _Path = ()) -> Any:
    """``tree`` with ``function(path, leaf)`` for its tensors; inside of other containers all have one path."""
    # Handles most batches: torch's pytree creates reference cycles at every call.
    if isinstance(tree, Tensor):
        return function(path, tree)
    if type(tree) is dict:
        return {name: _map_tensors(value, function, (*path, name)) for name, value in tree.items()}
    if type(tree) in (list, tuple):
        return type(tree)(_map_tensors(value, function, (*path, index)) for index, value in enumerate(tree))
    return pytree.tree_map_only(Tensor, lambda leaf: function(path, leaf), tree)
