"""Whether values of a checkpoint fit the objects that take them, which is found out before anything changes."""

from collections.abc import Mapping
from typing import Any

import numpy
from torch import Tensor, nn

from hybridpp.errors import CheckpointError

# What taking over a state raises that is not one: nobody checks it there.
_NO_STATE = (AttributeError, IndexError, KeyError, OverflowError, RuntimeError, TypeError, ValueError)


def is_like(saved: Any, here: Any) -> bool:
    """Whether a stored value may stand where another one is: numbers for numbers, lists for lists as long."""
    if here is None:
        return True
    if isinstance(here, list | tuple):
        same = isinstance(saved, list | tuple) and len(saved) == len(here)
        return same and all(map(is_like, saved, here))
    if isinstance(here, Mapping):
        return isinstance(saved, Mapping)
    if _is_number(here):
        return _is_number(saved)
    return not isinstance(here, str) or isinstance(saved, str)


def _is_number(value: Any) -> bool:
    if isinstance(value, Tensor):
        return value.numel() == 1
    return isinstance(value, bool | int | float | complex | numpy.generic)


def check_schedule(scheduler: Any, state: Any) -> None:
    """Check that an LR schedule takes a state, and leave it as it was.

    Raises:
        CheckpointError: it does not.
    """
    before = scheduler.state_dict()
    kind = type(scheduler.unwrap() if hasattr(scheduler, "unwrap") else scheduler)
    for key, value in state.items():
        if not isinstance(key, str) or not is_like(value, before.get(key)) or callable(getattr(kind, key, None)):
            raise CheckpointError(
                f"the state of the LR schedule has {key!r:.80} = {value!r:.80}, which is none of a {kind.__name__}. "
                "Restore the files from a copy"
            )
    try:
        scheduler.load_state_dict(dict(state))
    except _NO_STATE as error:
        raise CheckpointError(
            f"the state of the LR schedule is none of a {kind.__name__}: {type(error).__name__}: {error}. Restore the "
            "files from a copy"
        ) from error
    finally:
        scheduler.load_state_dict(before)


def check_extra_state(module: nn.Module, name: str, state: Any) -> None:
    """Check that a module takes an extra state, and leave it as it was.

    Raises:
        CheckpointError: it does not.
    """
    before = module.get_extra_state()
    try:
        module.set_extra_state(state)
    except Exception as error:  # of the script's own code
        raise CheckpointError(
            f"{name} is no state that set_extra_state of the {type(module).__name__} takes: {type(error).__name__}: "
            f"{error}. Restore the files from a copy"
        ) from error
    finally:
        module.set_extra_state(before)
