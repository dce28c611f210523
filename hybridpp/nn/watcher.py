"""Function modes that watch what runs, and that compiled code does not run under."""

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

from torch.nn import functional
from torch.overrides import TorchFunctionMode

from hybridpp.nn.torch_private import current_function_mode, pop_function_mode, push_function_mode


class WatchingMode(TorchFunctionMode):
    """A function mode that is not traced by a compiler: what runs compiled is not watched, only its result is."""

    def made(self, result: Any) -> None:
        """What compiled code returned."""
        raise NotImplementedError


def function_name(function: Any) -> str:
    """The name of a function, method or attribute of torch, as ``__torch_function__`` is given it; without ``__``."""
    name: str = getattr(function, "__name__", "")
    if name == "__get__":
        name = getattr(function.__self__, "__name__", name)
    return name.strip("_") if name.startswith("__") else name


def run_unwatched(function: Callable[..., Any], /, *args: Any) -> Any:
    """Call a compiled function outside of the watchers that are active."""
    popped: list[TorchFunctionMode] = []
    while current_function_mode() is not None:  # type: ignore[no-untyped-call]  # torch
        popped.append(pop_function_mode())  # type: ignore[no-untyped-call]  # torch
    watchers = [mode for mode in popped if isinstance(mode, WatchingMode)]
    others = [mode for mode in reversed(popped) if not isinstance(mode, WatchingMode)]
    for mode in others:
        push_function_mode(mode)  # type: ignore[no-untyped-call]  # torch
    try:
        result = function(*args)
    finally:
        for _ in others:
            pop_function_mode()  # type: ignore[no-untyped-call]  # torch
        for mode in reversed(popped):
            push_function_mode(mode)  # type: ignore[no-untyped-call]  # torch
    for watcher in watchers:
        watcher.made(result)
    return result


def with_lost_weight(function: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
    """The keyword arguments of a function as its caller gave them; call it in ``__torch_function__``.

    Torch 2.13's ``l1_loss`` does not pass its ``weight`` to function modes and subclasses of tensors. This can go when
    it does.
    """
    if function is not functional.l1_loss or "weight" in kwargs:
        return kwargs
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code is not functional.l1_loss.__code__:
        frame = frame.f_back
    weight = None if frame is None else frame.f_locals.get("weight")
    return kwargs if weight is None else {**kwargs, "weight": weight}
