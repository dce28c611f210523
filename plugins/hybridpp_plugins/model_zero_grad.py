"""``model.zero_grad()`` where ``parameter.grad`` does not show the gradients: it drops what the optimizer holds."""

from types import MethodType
from typing import Any

from torch import nn

from hybridpp.module_adapter import ModuleAdapter
from hybridpp_plugins.optimizer import HybridOptimizer


class ModelZeroGrad:
    """Replaces the method of a boosted model.

    Args:
        model: the user's.
        optimizer: holds its gradients.
    """

    def __init__(self, model: nn.Module, optimizer: HybridOptimizer):
        self._model, self._optimizer = model, optimizer

    def __call__(self, set_to_none: bool = True) -> None:
        """Drop the gradients that add up for the next step. Every rank must call it."""
        self._optimizer.zero_grad(set_to_none)
        type(self._model).zero_grad(self._model, set_to_none)
        if not set_to_none:
            self._optimizer.zero_grad(set_to_none=False)  # it has written zeros

    def __deepcopy__(self, memo: dict[int, Any]) -> MethodType:
        """A copy of a boosted model is not boosted: the method of its class."""
        return MethodType(type(self._model).zero_grad, memo[id(self._model)])


def let_model_clear(adapter: ModuleAdapter, optimizer: HybridOptimizer) -> None:
    """Let ``model.zero_grad()`` drop the gradients that the optimizer holds."""
    model = adapter.model
    adapter.set_attribute(model, "zero_grad", ModelZeroGrad(model, optimizer), "zero_grad of the optimizer")
