"""Run a unit that fakes cannot run (it looks at values, or a kernel has no fake) once for real, on made-up numbers."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils import _pytree as pytree

from hybridpp.partition.attributes import Attributes
from hybridpp.partition.belongings import Belongings
from hybridpp.partition.structure import Given

# Small, so that nothing overflows; no zero, so that little is divided by one.
_NUMBER = 0.01


Call: TypeAlias = tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]


def rehearse(module: nn.Module, call: Call, buffers: Mapping[int, Tensor]) -> Any:
    """Fakes of what a module's forward returns, where its arguments and the tensors of the module are fakes.

    Shapes that depend on values are those of the made-up ones. Parameters take no memory, all elements being the same
    one, unless a kernel insists.

    Args:
        module: with fakes in the place of its tensors.
        call: its forward, with positional and keyword arguments.
        buffers: real ones that fakes stand for, by ``id`` of the fake; they are copied.
    """
    try:
        return _Rehearsal(buffers, dense=False).run(module, *call)
    except RuntimeError:  # kernels for groups of matrices want strides
        return _Rehearsal(buffers, dense=True).run(module, *call)


class _Rehearsal:
    """Fakes and the made-up tensors that stand for them."""

    def __init__(self, buffers: Mapping[int, Tensor], dense: bool):
        self._buffers = buffers
        self._dense = dense
        self._real: dict[int, Tensor] = {}
        self._fake: dict[int, Any] = {}

    def run(self, module: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        inputs = pytree.tree_map(self.real, (args, kwargs))
        own, copies = Given((args, kwargs)), Given(inputs)
        objects = Belongings(inputs)
        try:
            objects.replace(self.real)
            with _in_place(module, self.real):
                versions = {number: tensor._version for number, tensor in self._real.items()}
                left = Attributes(module)
                output = forward(*inputs[0], **inputs[1])
                left.change(self.fake)
        except BaseException:
            objects.restore()
            raise
        objects.replace(self.fake)
        # Lists and dicts were copied with the inputs; objects were not, and are as they should be.
        places = [place for place in copies.changed() if not own.shares(place, copies)]
        own.repeat(places, pytree.tree_map(self.fake, copies.changes(places)))
        for number, version in versions.items():
            tensor = self._real[number]
            if tensor._version != version:
                torch.autograd.graph.increment_version(self._fake[id(tensor)])
        return pytree.tree_map(self.fake, output)

    def real(self, leaf: Any) -> Any:
        if not isinstance(leaf, FakeTensor):
            return leaf
        if id(leaf) not in self._real:
            buffer = self._buffers.get(id(leaf))
            if buffer is None or buffer.is_meta:
                made = _made_up(leaf, self._dense)
            else:
                made = buffer.to(leaf.device, leaf.dtype, copy=True)
            self._real[id(leaf)] = made
            self._fake[id(made)] = leaf
        return self._real[id(leaf)]

    def fake(self, leaf: Any) -> Any:
        if not isinstance(leaf, Tensor) or not self._fake:
            return leaf
        if id(leaf) not in self._fake:
            with next(iter(self._fake.values())).fake_mode:
                like = torch.empty_strided(leaf.size(), leaf.stride(), dtype=leaf.dtype, device=leaf.device)
                # A copy is no leaf of the graph, so glue may write to it.
                self._fake[id(leaf)] = like.requires_grad_(leaf.requires_grad).clone()
        return self._fake[id(leaf)]


def _made_up(fake: Tensor, dense: bool) -> Tensor:
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
    before = []
    try:
        for part in module.modules():
            for place in (part._parameters, part._buffers, vars(part)):
                for key, tensor in list(place.items()):
                    if isinstance(tensor, FakeTensor):
                        place[key] = real(tensor)
                        before.append((place, key, tensor, place[key]))
        yield
    finally:
        for place, key, tensor, made in reversed(before):
            if place.get(key) is made:  # and not something that the module set itself
                place[key] = tensor
