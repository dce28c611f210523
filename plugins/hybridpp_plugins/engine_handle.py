"""The attributes that boost sets on a model: its engine, and the names by which scripts unwrap a model."""

import weakref
from types import MethodType
from typing import Any

from torch import nn
from torch.optim.swa_utils import AveragedModel

from hybridpp.errors import ConfigError
from hybridpp.module_adapter import ModuleAdapter

ENGINE = "_hybridpp_engine"


class CopiedModel:
    """Replaces the engine in a copy of a boosted model (averaged weights, for example).

    Args:
        model: the original; it is referenced weakly.
    """

    def __init__(self, model: nn.Module):
        self._model = weakref.ref(model)

    def __deepcopy__(self, memo: Any) -> "CopiedModel":
        return self

    @property
    def model(self) -> nn.Module | None:
        """The original; None if it no longer exists."""
        return self._model()


class FailedBoost:
    """Replaces the engine in a model that a failed boost left without all its parameters."""


def attach_engine(adapter: ModuleAdapter, engine: object) -> None:
    """Attach its engine to a boosted model, so that both are freed together.

    ``model.unwrap()`` and ``model.module`` are the model itself, unless it has another attribute of that name. They are
    plain instance attributes, not submodules, so no parameter or submodule name changes; a copy refers to the copy.
    """
    model = adapter.model
    names = {"unwrap": MethodType(_itself, model), "module": model}
    for name, it in ({ENGINE: engine} | {name: it for name, it in names.items() if not hasattr(model, name)}).items():
        adapter.set_attribute(model, name, it, "engine")


def _itself(model: nn.Module) -> nn.Module:
    """The model: boosting wraps nothing."""
    return model


def copied_weights(model: nn.Module) -> nn.Module | None:
    """A copy of a boosted model: ``model`` itself, or the model in an ``AveragedModel``; None if it is neither."""
    model = model.module if isinstance(model, AveragedModel) else model
    return model if isinstance(model, nn.Module) and isinstance(vars(model).get(ENGINE), CopiedModel) else None


def original_of(copy: nn.Module) -> nn.Module:
    """The boosted model that :func:`copied_weights` gave a copy of.

    Raises:
        ConfigError: the original no longer exists.
    """
    model: nn.Module | None = vars(copy)[ENGINE].model
    if model is None:
        raise ConfigError(
            f"this {type(copy).__name__} is a copy of a boosted model that no longer exists, so the sharding of its "
            "weights is unknown. Keep the model that booster.boost returned."
        )
    return model
