"""Whether values of a checkpoint fit the objects that take them, which is found out before anything changes."""

import inspect
from collections.abc import Iterator, Mapping
from typing import Any

import numpy
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from hybridpp.errors import CheckpointError, named, text_of

# What taking over a state raises that is not one: nobody checks it there.
_NO_STATE = (AttributeError, IndexError, KeyError, OverflowError, RuntimeError, TypeError, ValueError)
# Settings that are finite in every optimizer: others may be without a bound.
_FINITE = ("lr", "initial_lr", "weight_decay", "momentum", "betas", "eps")
_LARGEST = torch.finfo(torch.float32).max
# Of the first rate: what a schedule's last one is below 0, by rounding.
_ROUNDING = 1e-6


def is_like(saved: Any, here: Any) -> bool:
    """Whether a stored value may stand where another one is: numbers for numbers, lists for lists as long."""
    if here is None:
        return True
    if isinstance(here, list | tuple):
        same = isinstance(saved, list | tuple) and len(saved) == len(here)
        return same and all(map(is_like, saved, here))
    if isinstance(here, Mapping):
        return isinstance(saved, Mapping)
    if isinstance(here, bool):
        return isinstance(saved, bool) or (_is_number(saved) and saved in (0, 1))
    if _is_number(here):
        return _is_number(saved) and not (isinstance(saved, bool) and isinstance(here, float))
    return not isinstance(here, str) or isinstance(saved, str)


def is_count(value: Any) -> bool:
    """Whether a stored value may be the number of steps of a parameter."""
    return _is_number(value) and not isinstance(value, complex) and 0 <= value <= _LARGEST


def _is_number(value: Any) -> bool:
    if isinstance(value, Tensor):
        return value.numel() == 1
    return isinstance(value, bool | int | float | complex | numpy.generic)


def check_settings(optimizer: Optimizer, index: int, saved: Mapping[str, Any]) -> None:
    """Check that an optimizer takes the stored settings of one of its groups, and change nothing.

    Its class judges them: it is constructed with them, as the script constructs it. Where its constructor takes other
    arguments, or refuses what the group has now, nothing is known of them but types and finite numbers.

    Args:
        optimizer: that takes them.
        index: of the group.
        saved: its settings.

    Raises:
        CheckpointError: it does not.
    """
    group = optimizer.param_groups[index]
    for key, value in saved.items():
        here = group.get(key)
        if not (is_like(value, here) if value is not None else not isinstance(here, bool)):
            raise _refused(index, key, value, f"and {here!r:.80} here")
        if key in _FINITE and not all(map(_is_finite, _numbers_in(value))):
            raise _refused(index, key, value, "which no float32 holds")
    known = {key: value for key, value in group.items() if key not in saved}
    reason = _why_not(optimizer, group, known | dict(saved))
    if reason and not _why_not(optimizer, group, group):
        # The one without which the others are taken; several, or two that do not fit together, have no such one.
        alone = [
            key for key in saved if key in group and not _why_not(optimizer, group, known | {**saved, key: group[key]})
        ]
        if alone:
            raise _refused(index, alone[0], saved[alone[0]], f"which {type(optimizer).__name__} refuses: {reason}")
        raise CheckpointError(
            f"group {index} of the optimizer has settings there that {type(optimizer).__name__} refuses: {reason}. "
            "Restore the files from a copy"
        )


def _refused(index: int, key: str, value: Any, why: str) -> CheckpointError:
    return CheckpointError(
        f"group {index} of the optimizer has {key!r:.80} = {value!r:.80} there, {why}. Restore the files from a copy"
    )


def _why_not(optimizer: Optimizer, group: Mapping[str, Any], settings: Mapping[str, Any]) -> str:
    """Why the class of an optimizer refuses settings; "": it does not, or takes no such arguments."""
    arguments = {key: _plain(value) for key, value in settings.items() if key in optimizer.defaults and key != "params"}
    try:
        taken = inspect.signature(type(optimizer)).parameters
        arguments = {key: value for key, value in arguments.items() if key in taken}
        # A schedule may end at 0, and by rounding below it, which some constructors refuse.
        first: Any = settings.get("initial_lr", group.get("initial_lr"))
        rate: Any = arguments.get("lr")
        if _is_number(rate) and _is_number(first) and -_ROUNDING * abs(first) <= rate <= 0:
            arguments["lr"] = first
        elif "lr" in arguments and rate == 0:
            arguments["lr"] = optimizer.defaults["lr"]
        type(optimizer)([nn.Parameter(torch.zeros(1))], **arguments)
    except Exception as error:  # of whoever wrote the optimizer
        return named(error)
    return ""


def _plain(value: Any) -> Any:
    """Numbers in place of tensors of one, and floats as parts, for which constructors have other rules."""
    if isinstance(value, list | tuple):
        return tuple(float(part) if type(part) is int else part for part in map(_plain, value))
    return value.item() if isinstance(value, Tensor) and value.numel() == 1 else value


def _numbers_in(value: Any) -> Iterator[Any]:
    if isinstance(value, list | tuple):
        for entry in value:
            yield from _numbers_in(entry)
    elif _is_number(value):
        yield value


def _is_finite(number: Any) -> bool:
    """Whether weights can be multiplied by a number."""
    return bool(abs(number) <= _LARGEST)


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
            f"the state of the LR schedule is none of a {kind.__name__}: {named(error)}. Restore the files from a copy"
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
            f"{text_of(error)}. Restore the files from a copy"
        ) from error
    finally:
        module.set_extra_state(before)
