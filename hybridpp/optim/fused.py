"""Torch's fused optimizer kernels: where they run, and choosing them for Adam and AdamW."""

import inspect
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.optim import SGD, Adagrad, Adam, Optimizer

from hybridpp.nn.torch_private import GLOBAL_STEP_PRE_HOOKS, step_pre_hooks_of
from hybridpp.optim.joined import JoinedOptimizer

_ADAM = inspect.unwrap(Adam.step)
_WITH_KERNELS = frozenset({_ADAM, inspect.unwrap(SGD.step), inspect.unwrap(Adagrad.step)})


def is_dense(param: Tensor) -> bool:
    """Whether the elements fill one block of memory without gaps or overlap, in any order of dimensions."""
    expected_stride = 1
    for stride, size in sorted(zip(param.stride(), param.shape, strict=True)):
        if size == 1:
            continue
        if stride != expected_stride:
            return False
        expected_stride *= size
    return True


def fuse_by_default(optimizer: Optimizer, device_types: Collection[str]) -> Callable[[], None]:
    """Let groups of an Adam or AdamW that leave the choice of kernels to torch use the fused ones; returns the undo.

    Torch's own choice on accelerators is foreach, which holds 4 more bytes per parameter during a step. Groups in which
    a parameter is on another device, or not of a floating-point format, are left alone.

    Args:
        optimizer: of any class; only those that run torch's own step of Adam are changed.
        device_types: where to fuse.
    """
    if isinstance(optimizer, JoinedOptimizer):
        undos = [fuse_by_default(one, device_types) for one in optimizer.optimizers]

        def undo_all() -> None:
            for undo in undos:
                undo()

        return undo_all
    if inspect.unwrap(type(optimizer).step) is not _ADAM:
        return lambda: None
    # By index, because loading a state replaces the groups.
    chosen: set[int] = set()

    def choose(_: Optimizer | None = None) -> None:
        for index, group in enumerate(optimizer.param_groups):
            if _is_undecided(group) and all(_can_fuse(param, device_types) for param in group["params"]):
                group["fused"] = True
                _move_steps(optimizer, group, to_device=True)
                chosen.add(index)

    choose()
    # A loaded state replaces the groups by the saved ones.
    handle = optimizer.register_load_state_dict_post_hook(choose)

    def undo_own() -> None:
        handle.remove()
        for index in chosen:
            optimizer.param_groups[index]["fused"] = None
            _move_steps(optimizer, optimizer.param_groups[index], to_device=False)

    return undo_own


def _is_undecided(group: dict[str, Any]) -> bool:
    return bool(group["params"]) and group["fused"] is None and group["foreach"] is None and not group["differentiable"]


def _can_fuse(param: Tensor, device_types: Collection[str]) -> bool:
    return param.is_floating_point() and param.device.type in device_types and is_dense(param)


def _move_steps(optimizer: Optimizer, group: dict[str, Any], *, to_device: bool) -> None:
    """Counts of steps are beside the parameter for fused kernels, else on the host."""
    for param in group["params"]:
        state = optimizer.state.get(param, {})
        if "step" in state and not group["capturable"]:
            optimizer.state[param] = {**state, "step": state["step"].to(param.device if to_device else "cpu")}


@contextmanager
def divided_in_kernel(optimizer: Optimizer, divisor: float) -> Iterator[None]:
    """A context in which the step of a fused optimizer divides the gradients; they are divided afterwards."""
    first = next(param for group in optimizer.param_groups for param in group["params"])
    attributes: Any = optimizer
    # As torch.amp.GradScaler asks for it.
    attributes.grad_scale = torch.full((), divisor, dtype=torch.float32, device=first.device)
    try:
        yield
    finally:
        del attributes.grad_scale


def can_divide(optimizer: Optimizer, updated: Collection[Tensor]) -> bool:
    """Whether :func:`divided_in_kernel` divides the gradients of all updated tensors, and no hook reads them before.

    Args:
        optimizer: of any class; all its groups are fused.
        updated: the tensors; those with a gradient count.
    """
    if inspect.unwrap(type(optimizer).step) not in _WITH_KERNELS or getattr(optimizer, "grad_scale", None) is not None:
        return False
    # A scheduler of torch's counts the calls of step.
    replaced = vars(optimizer).get("step")
    if replaced is not None and not getattr(replaced, "_wrapped_by_lr_sched", False):
        return False
    if step_pre_hooks_of(optimizer) or GLOBAL_STEP_PRE_HOOKS:
        return False
    reached = {id(param) for group in optimizer.param_groups for param in group["params"]}
    return bool(reached) and all(
        id(param) in reached and _is_divisible(param) for param in updated if param.grad is not None
    )


def _is_divisible(updated: Tensor) -> bool:
    gradient = updated.grad
    assert gradient is not None
    # The kernels divide in fp32. Gradients with other strides are copied before (see HybridAdam).
    return updated.dtype is gradient.dtype is torch.float32 and gradient.stride() == updated.stride()
