"""Run compiled code eagerly for a while."""

import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

_COMPILER = f"{torch.__name__}._dynamo"

_stance = ExitStack()


class _Eager(threading.local):
    """Whether compiled code runs as it was written now, in this thread: a rank, where ranks are threads.

    Attributes:
        num_inside: how often :func:`force_eager` is entered.
        num_entered: how often it has been entered so far.
    """

    num_inside = 0
    num_entered = 0


EAGER = _Eager()


class _Process:
    """All threads.

    Attributes:
        num_inside: how often they are inside.
    """

    num_inside = 0


class _StanceOfThread:
    """Torch's setting, which belongs to the process, for the threads that are inside.

    Those that never were compute for one that is: autograd's on a device, and ranks of a trial.
    """

    def __init__(self, before: Any):
        self._before = before

    def __getattr__(self, name: str) -> Any:
        return getattr(self._before, name)

    @property
    def stance(self) -> str:
        stance: str = self._before.stance if EAGER.num_entered and not EAGER.num_inside else "force_eager"
        return stance


def may_hold_compiled_code() -> bool:
    """Whether the script may have compiled something: a function, too, which only the code knows that calls it.

    Compiling imports the compiler, which :func:`force_eager` would do as well: it takes seconds.
    """
    return _COMPILER in sys.modules


def has_compiled() -> bool:
    """Whether torch.compile was called, for whatever: torch's optimizers import the compiler as well."""
    module = sys.modules.get(f"{_COMPILER}.eval_frame")
    # Unknown where a later torch has no such table.
    backends = getattr(module, "cached_backends", {0: True}) if module else {}
    return any(backends.values())


@contextmanager
def force_eager() -> Iterator[None]:
    """Inside, what torch.compile compiled runs as it was written.

    Torch's own setting belongs to the process, and puts back what it found. Ranks of one process that enter one after
    the other and leave in another order would leave the setting on: the last one to leave puts it back here. A
    rank that is not inside runs compiled code meanwhile: what it computed so, it must recompute so.
    """
    if not _Process.num_inside:
        setting = torch.compiler.set_stance("force_eager")
        setting.stance = _StanceOfThread(setting.prev)
        _stance.enter_context(setting)
    _Process.num_inside += 1
    EAGER.num_inside += 1
    EAGER.num_entered += 1
    try:
        yield
    finally:
        EAGER.num_inside -= 1
        _Process.num_inside -= 1
        if not _Process.num_inside:
            _stance.close()
