"""Remove from a model what other stages own."""

from collections.abc import Callable, Collection, ItemsView, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from hybridpp.nn import walk
from hybridpp.nn.names import qualified
from hybridpp.nn.torch_private import (
    BUFFERS,
    PARAMETERS,
    NormWithStatistics,
    buffers_of,
    children_of,
    parameters_of,
)
from hybridpp.partition.absent import ParameterVisibility, absent_tensor
from hybridpp.partition.calls import BufferKind


def parameter_names(model: nn.Module) -> list[str]:
    """Names of all parameters; a tied one has its first name."""
    return [name for name, _ in walk.named_parameters(model)]


class _OwnedTensors(dict[str, Any]):
    """A module's parameters or buffers: those that this rank owns, or all of them in their order.

    :class:`ParameterVisibility` says which. Only ``items()`` (as ``named_parameters()`` calls it) ever shows more than
    is owned; what this rank does not own is a plain attribute of the module, under the same name.
    """

    def __init__(self, module: nn.Module, held: Mapping[str, Any], foreign: set[str], visibility: ParameterVisibility):
        super().__init__({key: tensor for key, tensor in held.items() if key not in foreign})
        self._module = module
        self._order = tuple(held)
        self._visibility = visibility

    def items(self) -> ItemsView[str, Any]:  # type: ignore[override]  # a dict's view of itself has a type of its own
        if not self._visibility.shows_all:
            return super().items()
        attributes = vars(self._module)
        kept = {key: self.get(key, attributes.get(key)) for key in self._order if key in self or key in attributes}
        return (kept | self).items()


class WholeListing(walk.ScriptListing):
    """``named_parameters`` or ``named_buffers`` of a module inside the model, which also lists what others own.

    So a script that goes over two modules at once finds the pairs of one process, and one that counts or freezes finds
    all. The model itself lists what is owned: what optimizers, states and norms of gradients are made of.

    Args:
        module: whose method this is.
        method: that of the module's class.
        visibility: of the model's parameters and buffers.
    """

    def __init__(self, module: nn.Module, method: Callable[..., Iterable[Any]], visibility: ParameterVisibility):
        self._module, self._method, self._visibility = module, method, visibility

    def __call__(self, *args: Any, **kwargs: Any) -> Iterable[Any]:
        """As torch's method."""
        return self._visibility.listed(self._method(self._module, *args, **kwargs))


def prune_parameters(
    model: nn.Module,
    owners: Mapping[str, tuple[int, ...]],
    stages: Sequence[int],
    foreign_units: set[str],
    device: torch.device,
    dtypes: Mapping[int, torch.dtype],
    written: Collection[BufferKind] = (),
) -> ParameterVisibility:
    """Free the parameters that ``stages`` do not own, and hide them and the buffers of other stages' units.

    A freed parameter remains as a plain attribute of the same shape, dtype and device with one number as memory
    (:class:`AbsentTensor`), because container code may read a weight's dtype or device. So does a buffer of a kind that
    is ``written`` to, as running statistics are: this rank has its values at boost only.

    Returns:
        The switch that shows them again.
    """
    visibility = ParameterVisibility()
    own_stages = set(stages)
    foreign = {name: one for name, one in walk.named_parameters(model) if own_stages.isdisjoint(owners[name])}
    # One per parameter, so that tied parameters stay tied.
    placeholders = {
        id(p): absent_tensor(p, name, visibility, device, dtypes.get(id(p), p.dtype)) for name, p in foreign.items()
    }
    visibility.of_several = (
        frozenset(id(one) for name, one in walk.named_parameters(model) if not own_stages.issuperset(owners[name]))
        - placeholders.keys()
    )
    for module in walk.modules(model):
        _free_parameters(module, placeholders, visibility)
    own = _outside(model, foreign_units)
    for unit in foreign_units:
        for name, module in walk.named_modules(walk.submodule(model, unit)):
            if buffers_of(module) and module not in own:
                _hide_buffers(module, qualified(unit, name), device, visibility, written)
    for module in walk.modules(model)[1:]:
        inner = walk.modules(module)
        if any(isinstance(parameters_of(one), _OwnedTensors) for one in inner):
            vars(module)["named_parameters"] = WholeListing(module, type(module).named_parameters, visibility)
        if any(isinstance(buffers_of(one), _OwnedTensors) for one in inner):
            vars(module)["named_buffers"] = WholeListing(module, type(module).named_buffers, visibility)
    return visibility


def _free_parameters(module: nn.Module, placeholders: Mapping[int, Tensor], visibility: ParameterVisibility) -> None:
    """Replace a module's own parameters that have a placeholder, by ``id``."""
    held = parameters_of(module)
    freed = {key: placeholders[id(tensor)] for key, tensor in held.items() if id(tensor) in placeholders}
    if freed:
        vars(module)[PARAMETERS] = _OwnedTensors(module, held, set(freed), visibility)
        vars(module).update(freed)


def _hide_buffers(
    module: nn.Module, name: str, device: torch.device, visibility: ParameterVisibility, written: Collection[BufferKind]
) -> None:
    """Hide a module's own buffers."""
    held = buffers_of(module)
    for key, buffer in held.items():
        if buffer is not None and (isinstance(module, NormWithStatistics) or (type(module), key) in written):
            vars(module)[key] = absent_tensor(
                buffer, qualified(name, key), visibility, device, buffer.dtype, is_buffer=True
            )
        else:
            vars(module)[key] = _buffer_placeholder(buffer, device)
    vars(module)[BUFFERS] = _OwnedTensors(module, held, set(held), visibility)


def _outside(model: nn.Module, units: set[str]) -> set[nn.Module]:
    """The modules that are also outside of these units: a table that several blocks share is one module in all of
    them."""
    found: set[nn.Module] = set()
    pending = [("", model)]
    while pending:
        name, module = pending.pop()
        found.add(module)
        inner = [(qualified(name, key), child) for key, child in children_of(module).items() if child is not None]
        pending += [(path, child) for path, child in inner if path not in units and child not in found]
    return found


def _buffer_placeholder(buffer: Tensor | None, device: torch.device) -> Tensor | None:
    """A buffer of another stage's unit; one on the meta device is never filled here."""
    if buffer is None:
        return None
    if buffer.is_meta:
        return torch.zeros((), dtype=buffer.dtype, device=device).expand(buffer.shape)
    return buffer.to(device)
