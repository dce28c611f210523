"""Everything that is put on the modules of one model."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from hybridpp.errors import ConfigError
from hybridpp.module_adapter import order as _order
from hybridpp.module_adapter.changes import AttributeSet, Change, HookPut
from hybridpp.module_adapter.describe import describe
from hybridpp.module_adapter.order import AdapterLayer
from hybridpp.module_adapter.wrapper import Forward, ModuleWrapper
from hybridpp.nn.snapshot import MISSING


class ModuleAdapter:
    """Puts layers, hooks and attributes on the modules of one model, and takes them off again.

    Args:
        model: as the script made it.
        order: how layers are nested, the innermost first; None: :data:`~hybridpp.module_adapter.ORDER`.
        before_irreversible: called before something is done that cannot be undone.

    Attributes:
        model: as given.

    Example:
        >>> layer = nn.Linear(2, 2)
        >>> adapter = ModuleAdapter(layer)
        >>> adapter.wrap(layer, AdapterLayer.DTYPE, lambda inner, x: inner(x.float()))
        >>> adapter.layers_of(layer)
        (<AdapterLayer.DTYPE: 'dtype boundary'>,)
        >>> adapter.remove()
        >>> "forward" in vars(layer)
        False
    """

    def __init__(
        self,
        model: nn.Module,
        order: Sequence[AdapterLayer] | None = None,
        before_irreversible: Callable[[], None] = lambda: None,
    ):
        self.model = model
        self._order = _order.ORDER if order is None else tuple(order)
        self._wrappers: dict[nn.Module, ModuleWrapper] = {}
        self._compiled: set[nn.Module] = set()
        self._changes: list[Change] = []
        self._before_irreversible = before_irreversible

    def __deepcopy__(self, memo: dict[int, Any]) -> "ModuleAdapter":
        """A copy of a boosted model is no boosted model: what is on it can be run, and not be taken off."""
        return ModuleAdapter(nn.Module())

    def expect_compiled(self, modules: Iterable[nn.Module]) -> None:
        """Take note of modules whose calls are compiled with the layers inside their hooks; before one is put there."""
        self._compiled.update(modules)

    def wrap(self, module: nn.Module, layer: AdapterLayer, function: Forward, *bound: Any) -> None:
        """Let a call of ``module.forward`` be ``function(*bound, inner, *args, **kwargs)``, inside its hooks.

        Args:
            module: of the model.
            layer: says where in the order ``function`` stands; a module has each layer at most once.
            function: calls ``inner``, the next layer or the module's own forward. It must be one that may be called for
                a copy of the model with copies of ``bound``: a function of a module, or a method.
            bound: its first arguments.
        """
        self._wrapper(module).add(layer, function, bound, around_hooks=False)

    def wrap_call(self, module: nn.Module, layer: AdapterLayer, function: Forward, *bound: Any) -> None:
        """Let a call of ``module`` be ``function(*bound, inner, *args, **kwargs)``, around its hooks.

        See :meth:`wrap`. Where the module is compiled in place, ``inner`` is what is compiled.
        """
        self._wrapper(module).add(layer, function, bound, around_hooks=True)

    def _wrapper(self, module: nn.Module) -> ModuleWrapper:
        if module not in self._wrappers:
            self._wrappers[module] = ModuleWrapper(module, self._order, module in self._compiled)
        return self._wrappers[module]

    def take_off(self, layer: AdapterLayer) -> None:
        """Take one layer off all modules."""
        for wrapper in self._wrappers.values():
            wrapper.take_off(layer)

    def layers_of(self, module: nn.Module) -> tuple[AdapterLayer, ...]:
        """The layers that are on a module, the outermost first."""
        return self._wrappers[module].layers if module in self._wrappers else ()

    def set_attribute(self, owner: nn.Module | Tensor, name: str, value: Any, what: str) -> None:
        """Let an instance attribute be ``value``, past what ``__setattr__`` of the class does.

        Args:
            owner: a module, or a tensor of one.
            name: of the attribute.
            value: of the attribute.
            what: what it is for, for :meth:`describe`.
        """
        attributes = vars(owner)
        self._changes.append(AttributeSet(owner, what, name, attributes.get(name, MISSING), value))
        attributes[name] = value

    def hooked(self, module: nn.Module, what: str, handle: RemovableHandle) -> RemovableHandle:
        """Take note of a hook that was registered on a module; returns its handle."""
        self._changes.append(HookPut(module, what, handle.remove))
        return handle

    def noted(self, owner: nn.Module | Tensor, what: str, undo: Callable[[], None] | None) -> None:
        """Take note of something else that is done to ``owner``, and of how it is undone; None: it cannot be.

        What cannot be undone is noted before it is done.
        """
        if undo is None:
            self._before_irreversible()
        self._changes.append(HookPut(owner, what, undo))

    @property
    def put(self) -> Mapping[nn.Module | Tensor, tuple[str, ...]]:
        """What is on each module or tensor that something was put on: layers, the outermost first, then the rest."""
        found: dict[Any, list[str]] = {}
        for module, wrapper in self._wrappers.items():
            if wrapper.layers:
                found[module] = [str(layer) for layer in wrapper.layers]
        for change in self._changes:
            listed = found.setdefault(change.owner, [])
            listed += [change.what] if change.what not in listed else []
        return {owner: tuple(listed) for owner, listed in found.items()}

    def describe(self) -> str:
        """What is on each module and tensor, as text: a line for those of one class, name pattern and content."""
        return describe(self.model, self.put)

    def check_removable(self) -> None:
        """Refuse to take anything off where the script has put something over it.

        Raises:
            ConfigError: it has.
        """
        names = {module: name for name, module in self.model.named_modules()}
        for module, wrapper in self._wrappers.items():
            if (attribute := wrapper.replaced_attribute()) is not None:
                raise ConfigError(_replaced(names, module, attribute))
        for change in self._changes:
            if not change.can_be_undone:
                raise ConfigError(
                    f"a {type(change.owner).__name__} of {type(self.model).__name__} cannot be as it was before boost: "
                    f"{change.what}. Save the model and load it anew."
                )
        last = {(id(change.owner), change.name): change for change in self._changes if isinstance(change, AttributeSet)}
        for change in last.values():
            if change.is_replaced():
                raise ConfigError(_replaced(names, change.owner, change.name))

    def remove(self) -> None:
        """Take everything off, the last things first. Nothing is taken off where that is refused.

        Raises:
            ConfigError: see :meth:`check_removable`.
        """
        self.check_removable()
        while self._changes:
            self._changes.pop().undo()
        for wrapper in self._wrappers.values():
            for layer in wrapper.layers:
                wrapper.take_off(layer)
        self._wrappers.clear()


def _replaced(names: Mapping[nn.Module, str], owner: Any, attribute: str) -> str:
    name = names.get(owner) if isinstance(owner, nn.Module) else None
    where = f"module {name!r}" if name else f"the {type(owner).__name__}"
    return (
        f"{attribute!r} of {where} was set after boost, so what boost put there cannot be taken off. Give it the value "
        "that it had after boost."
    )
