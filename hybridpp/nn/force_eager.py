"""Run compiled code eagerly for a while."""

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch

_COMPILER = f"{torch.__name__}._dynamo"

_stance = ExitStack()


class _Eager:
    """Whether compiled code runs as it was written now.

    Attributes:
        num_inside: how often :func:`force_eager` is entered, by all ranks of the process.
    """

    num_inside = 0


EAGER = _Eager()


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
    the other and leave in another order would leave the setting on: the last one to leave puts it back here.
    """
    if not EAGER.num_inside:
        _stance.enter_context(torch.compiler.set_stance("force_eager"))
    EAGER.num_inside += 1
    try:
        yield
    finally:
        EAGER.num_inside -= 1
        if not EAGER.num_inside:
            _stance.close()
