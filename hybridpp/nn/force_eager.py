"""Run compiled code eagerly for a while."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch

_stance = ExitStack()
_num_inside = 0


@contextmanager
def force_eager() -> Iterator[None]:
    """Inside, what torch.compile compiled runs as it was written.

    Torch's own setting belongs to the process, and puts back what it found. Ranks of one process that enter one after
    the other and leave in another order would leave the setting on: the last one to leave puts it back here.
    """
    global _num_inside
    if not _num_inside:
        _stance.enter_context(torch.compiler.set_stance("force_eager"))
    _num_inside += 1
    try:
        yield
    finally:
        _num_inside -= 1
        if not _num_inside:
            _stance.close()
