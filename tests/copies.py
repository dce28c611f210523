"""Models that many tests make: made once, then copied."""

import copy
import functools
from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack


def copied(make: Callable[..., Any]) -> Callable[..., Any]:
    """Makes a model once for all calls with the same arguments; each call returns a copy.

    The generator is left as making the model leaves it. On another device or in another dtype than usual, and where
    operations are watched, each call makes the model.
    """
    made: dict[Hashable, Any] = {}

    @functools.wraps(make)
    def model_of(*args: Any, **kwargs: Any) -> Any:
        if _is_elsewhere():
            return make(*args, **kwargs)
        key = args, tuple(sorted(kwargs.items()))
        if key not in made:
            made[key] = make(*args, **kwargs), torch.default_generator.get_state()
        model, state = made[key]
        torch.default_generator.set_state(state)
        return copy.deepcopy(model)

    return model_of


def _is_elsewhere() -> bool:
    return (
        torch.get_default_device().type != "cpu"
        or torch.get_default_dtype() is not torch.float32
        or torch.cuda.is_initialized()
        or bool(_get_current_dispatch_mode_stack())
    )
