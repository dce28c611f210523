"""Errors in trials: the reason for a rejection, unless the machine failed."""

import torch

_MAX_LENGTH = 200
# Failures of the machine: memory ran out, or a device does not respond. The next trial would fail, too.
_MACHINE_FAILURES = (MemoryError, torch.OutOfMemoryError, torch.AcceleratorError)


def is_machine_failure(error: Exception) -> bool:
    """Whether an error says nothing about the candidate, so that the search must end with it."""
    return isinstance(error, _MACHINE_FAILURES)


def failure_reason(error: Exception) -> str:
    """An error as a reason, shortened.

    Raises:
        Exception: the error itself, if :func:`is_machine_failure`.
    """
    if is_machine_failure(error):
        raise error
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text if len(text) <= _MAX_LENGTH else f'{text[:_MAX_LENGTH]}…'}"
