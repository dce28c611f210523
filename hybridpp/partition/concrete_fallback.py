"""Run a unit on real placeholder values, if it cannot run on fake tensors (it reads values, or a kernel has no
fake)."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from hybridpp.errors import PartitionError
from hybridpp.nn.snapshot import Replacements, Snapshot
from hybridpp.nn.torch_private import (
    DisableTorchFunctionSubclass,
    FakeTensor,
    buffers_of,
    parameters_of,
    pytree,
    version_of,
)
from hybridpp.partition.containers import ContainerSnapshot
from hybridpp.partition.module_outputs import AttributeSnapshot
from hybridpp.partition.object_state import replace_tensors

_MOST = 400


class UntraceableUnitError(PartitionError):
    """A unit failed on placeholder values and on fake tensors.

    Args:
        unit: its name and class, as text.
        real: the error on placeholder values.
        fake: the error on fake tensors.
    """

    def __init__(self, unit: str, real: Exception, fake: Exception):
        super().__init__(
            f"{unit} failed while the model was traced: on placeholder values, {_summary(real)}; on fake tensors, "
            f"{_summary(fake)}. Run the model alone on such a batch, in this precision and with this tp_size: if it "
            "raises there, change one of them; if it does not, use pp_size=1."
        )
        self.fake = fake


def _summary(error: Exception) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text if len(text) <= _MOST else f'{text[:_MOST]}…'}".rstrip(". ")


# Small, so that nothing overflows; not 0, to avoid divisions by zero.
_NUMBER = 0.01


ForwardCall: TypeAlias = tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]


def run_on_concrete_values(
    module: nn.Module, call: ForwardCall, buffers: Mapping[int, Tensor], reached: Sequence[Any] = ()
) -> Any:
    """Fakes of what a module's forward returns, given fakes as its arguments and tensors.

    Shapes that depend on values are those of the placeholder values. Parameters share one element as memory, unless a
    kernel requires dense ones.

    Args:
        module: a module that holds fakes instead of its tensors.
        call: its forward, positional and keyword arguments.
        buffers: real buffers by ``id`` of their fakes; they are copied.
        reached: other things that the forward may write to (see :meth:`ModelHooks.reached_from`).
    """
    try:
        return _ConcreteRun(buffers, False, reached).run(module, *call)
    except RuntimeError:  # kernels for grouped matrix products require dense tensors
        return _ConcreteRun(buffers, True, reached).run(module, *call)


class _ConcreteRun:
    """Fakes, and the concrete tensors that replace them."""

    def __init__(self, buffers: Mapping[int, Tensor], dense: bool, reached: Sequence[Any]):
        self._buffers, self._reached = buffers, reached
        self._dense = dense
        self._real: dict[int, Tensor] = {}
        self._fake: dict[int, Any] = {}

    def run(self, module: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        inputs = pytree.tree_map(self.real, (args, kwargs))
        own, copies = ContainerSnapshot((args, kwargs)), ContainerSnapshot(inputs)
        objects = pytree.tree_leaves(inputs)
        before, reached = Snapshot.reachable_from(objects), ContainerSnapshot(tuple(self._reached))
        left: AttributeSnapshot | None = None
        try:
            replace_tensors(objects, self.real)
            with _in_place(module, self.real):
                versions = {number: version_of(tensor) for number, tensor in self._real.items()}
                left = AttributeSnapshot(module)
                output = forward(*inputs[0], **inputs[1])
                left.change(self.fake)
        except BaseException:
            before.restore()
            reached.restore()
            if left is not None:
                left.restore_lists()
            raise
        reached.repeat(reached.changed(), pytree.tree_map(self.fake, reached.changes(reached.changed())))
        replace_tensors(objects, self.fake)
        # Lists and dicts were copied with the inputs; objects were not, and need no change.
        changed = [index for index in copies.changed() if not own.shares(index, copies)]
        own.repeat(changed, pytree.tree_map(self.fake, copies.changes(changed)))
        for number, version in versions.items():
            tensor = self._real[number]
            if version_of(tensor) != version:
                torch.autograd.graph.increment_version(self._fake[id(tensor)])
        return pytree.tree_map(self.fake, output)

    def real(self, leaf: Any) -> Any:
        if not isinstance(leaf, FakeTensor):
            return leaf
        if id(leaf) not in self._real:
            buffer = self._buffers.get(id(leaf))
            if buffer is None or buffer.is_meta:
                made = _concrete(leaf, self._dense)
            else:
                made = buffer.to(leaf.device, leaf.dtype, copy=True)
            self._real[id(leaf)] = made
            self._fake[id(made)] = leaf
        return self._real[id(leaf)]

    def fake(self, leaf: Any) -> Any:
        if not isinstance(leaf, Tensor) or not self._fake:
            return leaf
        if id(leaf) not in self._fake:
            # Without torch functions: a tensor that gathers its shards lazily would be gathered to report its strides.
            with DisableTorchFunctionSubclass():
                size, stride, wants_gradient = leaf.size(), leaf.stride(), leaf.requires_grad
                dtype, device = leaf.dtype, leaf.device
            with next(iter(self._fake.values())).fake_mode:
                like = torch.empty_strided(size, stride, dtype=dtype, device=device)
                # A copy is no leaf of the graph, so container code may write to it.
                self._fake[id(leaf)] = like.requires_grad_(wants_gradient).clone()
        return self._fake[id(leaf)]


def _concrete(fake: Tensor, dense: bool) -> Tensor:
    number = _NUMBER if fake.is_floating_point() or fake.is_complex() else 0
    with torch.no_grad():
        scalar = torch.full((), number, dtype=fake.dtype, device=fake.device)
        if isinstance(fake, nn.Parameter) and not dense:
            return nn.Parameter(scalar.expand(fake.shape), requires_grad=fake.requires_grad)
        tensor = torch.empty_strided(fake.size(), fake.stride(), dtype=fake.dtype, device=fake.device).copy_(scalar)
    if isinstance(fake, nn.Parameter):
        return nn.Parameter(tensor, requires_grad=fake.requires_grad)
    return tensor.requires_grad_().clone() if fake.requires_grad else tensor


@contextmanager
def _in_place(module: nn.Module, real: Callable[[Any], Any]) -> Iterator[None]:
    """Inside, a module holds ``real(fake)`` for each fake; what it sets itself stays afterwards."""
    replaced = Replacements()
    try:
        for part in module.modules():
            for held in (parameters_of(part), buffers_of(part), vars(part)):
                for key, tensor in list(held.items()):
                    if isinstance(tensor, FakeTensor):
                        replaced.put(held, key, real(tensor))
        yield
    finally:
        replaced.restore(keep_newer=True)
