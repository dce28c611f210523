"""Whether code runs inside activation checkpointing, so that the backward pass runs it again.

Two ways to see it. The call stack shows both kinds of torch's checkpoints, under ``no_grad`` and on fake tensors too,
but walking it costs microseconds: for traces and trial runs. Autograd's saved-tensor hooks cost 0.1 µs to read, for
every call of a layer, but the reentrant kind sets none (it runs under ``no_grad``), and a user's own hooks look alike.
"""

import inspect
import sys
from types import CodeType, FrameType

import torch
from torch.utils.checkpoint import CheckpointFunction, checkpoint

from hybridpp.nn.torch_private import saved_tensor_hooks

_CHECKPOINT = inspect.unwrap(checkpoint).__code__
_REENTRANT = CheckpointFunction.forward.__code__


def in_checkpoint() -> bool:
    """Whether this runs inside a checkpoint of either kind, by the call stack."""
    return _runs_inside(_CHECKPOINT)


def in_reentrant_checkpoint() -> bool:
    """Whether this runs inside a checkpoint with ``use_reentrant=True``, by the call stack."""
    return not torch.is_grad_enabled() and _runs_inside(_REENTRANT)


def may_run_again() -> bool:
    """Whether the backward pass may run this again: gradients are off, or saved tensors have hooks."""
    return not torch.is_grad_enabled() or has_saved_tensor_hooks()


def has_saved_tensor_hooks() -> bool:
    """Whether hooks take what autograd saves here: of activation checkpointing, or the user's."""
    return saved_tensor_hooks() is not None


def recomputes_saved_tensors() -> bool:
    """Whether what autograd saves here is computed again in the backward pass, just before it is used."""
    hooks = saved_tensor_hooks()
    return hooks is not None and hooks[0].__module__ == "torch.utils.checkpoint"


def _runs_inside(function: CodeType) -> bool:
    frame: FrameType | None = sys._getframe()
    while frame is not None and frame.f_code is not function:
        frame = frame.f_back
    return frame is not None
