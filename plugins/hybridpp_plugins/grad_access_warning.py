"""A warning for scripts that look for gradients in ``parameter.grad``: it is None in half precision and with ZeRO."""

import copy
from collections.abc import Callable, ItemsView, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import nn

from hybridpp.cluster import get_dist_logger
from hybridpp.data_parallel import GradientReducer
from hybridpp.module_adapter import ModuleAdapter
from hybridpp.nn.torch_private import PARAMETERS, parameters_of


class GradAccessWarning:
    """Detects that a script lists a model's parameters between backward and step, as torch's clipping does.

    Args:
        reducer: the gradients.
    """

    def __init__(self, reducer: GradientReducer) -> None:
        self._reducer = reducer
        self._is_quiet = False
        self._has_warned = False
        self._is_running: Callable[[], bool] = lambda: False

    def watch(self, adapter: ModuleAdapter, is_running: Callable[[], bool]) -> None:
        """Detect when the model's parameters are listed, except during steps (``is_running``)."""
        self._is_running = is_running
        # One module suffices: listing parameters visits all modules.
        for module in adapter.model.modules():
            if type(parameters_of(module)) is dict:
                before = parameters_of(module)
                vars(module)[PARAMETERS] = _Listed(before, self)
                adapter.noted(module, "notice of listed parameters", partial(_put_back, module, before))
                return

    @contextmanager
    def quiet(self) -> Iterator[None]:
        """A context in which the library or the model itself lists parameters."""
        before, self._is_quiet = self._is_quiet, True
        try:
            yield
        finally:
            self._is_quiet = before

    def listed(self) -> None:
        """The parameters are listed."""
        if self._is_quiet or self._has_warned or self._is_running() or not self._reducer.has_gradients:
            return
        self._has_warned = True
        get_dist_logger().warning(
            "the model's parameters were listed between backward and step. If the script looks for gradients: in bf16, "
            "in fp16 and with ZeRO, parameter.grad is None, and torch.nn.utils.clip_grad_norm_ clips nothing. Call "
            "optimizer.clip_grad_by_norm(max_norm), or set HybridParallelPlugin(max_norm=...); optimizer.gradients() "
            "returns the gradients, and model.zero_grad() or optimizer.zero_grad() drops them.",
            ranks=[0],
        )


class _Listed(dict[str, Any]):
    """A module's parameters; ``items()``, which ``named_parameters()`` calls, reports that they are listed."""

    def __init__(self, held: dict[str, Any], notes: GradAccessWarning):
        super().__init__(held)
        self._notes = notes

    def items(self) -> ItemsView[str, Any]:  # type: ignore[override]  # a dict's view of itself has a type of its own
        self._notes.listed()
        return super().items()

    def __deepcopy__(self, memo: Any) -> dict[str, Any]:
        # A copy of a boosted model is not boosted.
        return copy.deepcopy(dict(self), memo)

    def __reduce__(self) -> Any:
        return dict, (dict(self),)


def _put_back(module: nn.Module, before: dict[str, Any]) -> None:
    """Let a module hold its parameters in the dict that it had before, with whatever was registered since."""
    now = dict(parameters_of(module))
    before.clear()
    before.update(now)
    vars(module)[PARAMETERS] = before
