"""When the units of a model run: in the forward, and in the backward pass."""

from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor, nn

from hybridpp.module_adapter import AdapterLayer, Forward, ModuleAdapter
from hybridpp.nn.torch_private import pytree

# To look at a tensor that is gathered when it is read would gather it.
_PLAIN = (Tensor, nn.Parameter)


class UnitMarks(NamedTuple):
    """Moments of one forward and backward pass, as ``now()`` gives them.

    Attributes:
        name: of the unit.
        begin, end: of its call.
        gradient: when the gradient of its result is complete, so that its backward pass begins; None: there is none.
        arguments: what ``look`` found of the tensors among its arguments.
        results: the same of its results; None for a leaf that is no tensor.
    """

    name: str
    begin: Any
    end: Any
    gradient: Any = None
    arguments: tuple[Any, ...] = ()
    results: tuple[Any, ...] = ()


class UnitRecorder:
    """Records the calls of a model's units, in the forward only: a call that is repeated in the backward pass is not.

    Args:
        adapter: of the model.
        units: names of its units.
        now: the time, or the number of an event.
        look: called with each tensor among a unit's arguments and results.

    Attributes:
        calls: of the latest forward since :meth:`clear`.
        is_recording: whether calls are recorded.
    """

    def __init__(
        self,
        adapter: ModuleAdapter,
        units: tuple[str, ...],
        now: Callable[[], Any],
        look: Callable[[Tensor], Any] = lambda tensor: None,
    ):
        self.calls: list[UnitMarks] = []
        self.is_recording = False
        self._now, self._look = now, look
        self._depth = 0
        modules: dict[nn.Module, str] = {}
        for name in units:
            module = adapter.model.get_submodule(name)
            if module not in modules:
                modules[module] = name
                adapter.wrap(module, AdapterLayer.MODEL, self._run, name)

    def __deepcopy__(self, memo: dict[int, Any]) -> "UnitRecorder":
        return self

    def clear(self) -> None:
        """Forget all calls."""
        self.calls.clear()

    def _run(self, name: str, forward: Forward, /, *args: Any, **kwargs: Any) -> Any:
        if not self.is_recording or self._depth:
            return forward(*args, **kwargs)
        found = tuple(self._look(leaf) for leaf in pytree.tree_leaves((args, kwargs)) if type(leaf) in _PLAIN)
        index = len(self.calls)
        self.calls.append(UnitMarks(name, self._now(), None, None, found))
        self._depth += 1
        try:
            output = forward(*args, **kwargs)
        finally:
            self._depth -= 1
        leaves = pytree.tree_leaves(output)
        results = tuple(self._look(leaf) if type(leaf) in _PLAIN else None for leaf in leaves)
        self.calls[index] = self.calls[index]._replace(end=self._now(), results=results)
        leaf = next((one for one in leaves if type(one) in _PLAIN and one.requires_grad), None)
        if leaf is not None:
            leaf.register_hook(lambda gradient: self._note_gradient(index))
        return output

    def _note_gradient(self, index: int) -> None:
        # Once: a tensor that is returned by two units has two hooks.
        if index < len(self.calls) and self.calls[index].gradient is None:
            self.calls[index] = self.calls[index]._replace(gradient=self._now())
