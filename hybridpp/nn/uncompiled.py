"""Functions that torch's compiler calls without looking into them."""

from collections.abc import Callable
from typing import Any

import torch

_disabled: Callable[..., Any] | None = None


def uncompiled() -> Callable[..., Any]:
    """A function that calls its first argument with the others, as it was written, between two compiled graphs.

    Always the same function, so that equal modules share compiled code. Made at the first call, which imports the
    compiler.
    """
    global _disabled
    if _disabled is None:
        _disabled = torch.compiler.disable(_call)  # type: ignore[no-untyped-call]  # torch
    return _disabled


def _call(function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    return function(*args, **kwargs)
