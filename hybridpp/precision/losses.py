"""Torch's loss functions in fp32, where the forward of a half-precision model calls them itself."""

import functools
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode, _get_current_function_mode, _pop_mode, _push_mode
from torch.utils import _pytree as pytree

_Forward = Callable[..., Any]

# Not linear_cross_entropy, which is a layer, too.
_IN_FUNCTIONAL = (
    "binary_cross_entropy",
    "binary_cross_entropy_with_logits",
    "cosine_embedding_loss",
    "cross_entropy",
    "ctc_loss",
    "gaussian_nll_loss",
    "hinge_embedding_loss",
    "huber_loss",
    "kl_div",
    "l1_loss",
    "margin_ranking_loss",
    "mse_loss",
    "multi_margin_loss",
    "multilabel_margin_loss",
    "multilabel_soft_margin_loss",
    "nll_loss",
    "poisson_nll_loss",
    "smooth_l1_loss",
    "soft_margin_loss",
    "triplet_margin_loss",
    "triplet_margin_with_distance_loss",
)
_IN_TORCH = (
    "binary_cross_entropy_with_logits",
    "cosine_embedding_loss",
    "ctc_loss",
    "hinge_embedding_loss",
    "kl_div",
    "margin_ranking_loss",
    "poisson_nll_loss",
    "triplet_margin_loss",
)
LOSSES = frozenset(
    [getattr(functional, name) for name in _IN_FUNCTIONAL] + [getattr(torch, name) for name in _IN_TORCH]
)


class Fp32Losses:
    """Casts up what a model hands to a loss function, so that the loss and all behind it are fp32.

    A mode of torch's sees the calls. It costs every other call of torch a microsecond, so it is on for all of a forward
    only where the arguments are of a new kind. Later it is on where a loss function was seen: in the glue between
    units, or in units of the same class. Where none was seen, all that is done is to look into a set per unit.

    Only the instance attribute ``forward`` of the model and its units is set. Other threads are not touched: a mode
    belongs to one.

    Args:
        model: in half precision; with all of its units, whatever will become of them.
        units: their names, as fine as can be.
    """

    def __init__(self, model: nn.Module, units: Iterable[str]):
        self._mode = _LossMode(self._note)
        self._known: set[Any] = set()
        self._callers: set[type] = set()
        self._in_glue = False
        self._is_repeated = False
        self._everywhere = False
        self._unit: type | None = None
        # functools.partial and no closure, so that the model can still be copied.
        for module in {id(module): module for module in map(model.get_submodule, units)}.values():
            module.forward = functools.partial(self._run_unit, type(module), module.forward)
        model.forward = functools.partial(self._run_model, model, model.forward)

    def _note(self) -> None:
        if self._unit is None:
            self._in_glue = True
            self._is_repeated |= _in_checkpoint()
        else:
            self._callers.add(self._unit)

    def _run_model(self, model: nn.Module, forward: _Forward, /, *args: Any, **kwargs: Any) -> Any:
        kind = (model.training, _kind((args, kwargs)))
        is_known = kind in self._known
        if is_known and not self._in_glue:
            return forward(*args, **kwargs)
        before, self._everywhere = self._everywhere, not is_known
        try:
            with self._mode:
                result = forward(*args, **kwargs)
        finally:
            self._everywhere = before
        # Not where it was left early: a stage's forward has not seen all of it. A trace has.
        self._known.add(kind)
        return result

    def _run_unit(self, kind: type, forward: _Forward, /, *args: Any, **kwargs: Any) -> Any:
        wanted = self._everywhere or kind in self._callers
        is_on = _get_current_function_mode() is self._mode  # type: ignore[no-untyped-call]  # torch
        if not wanted:
            return self._run_outside(forward, *args, **kwargs) if is_on else forward(*args, **kwargs)
        before, self._unit = self._unit, kind
        try:
            with nullcontext() if is_on else self._mode:
                return forward(*args, **kwargs)
        finally:
            self._unit = before

    def _run_outside(self, forward: _Forward, /, *args: Any, **kwargs: Any) -> Any:
        _pop_mode()  # type: ignore[no-untyped-call]  # torch
        try:
            return forward(*args, **kwargs)
        finally:
            _push_mode(self._mode)  # type: ignore[no-untyped-call]  # torch

    @contextmanager
    def again(self) -> Iterator[None]:
        """Wrap a backward pass: glue that activation checkpointing runs again computes losses as it did before."""
        with self._mode if self._is_repeated else nullcontext():
            yield


class _LossMode(TorchFunctionMode):
    def __init__(self, note: Callable[[], None]):
        super().__init__()
        self._note = note

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in LOSSES:
            self._note()
            args, kwargs = pytree.tree_map_only(Tensor, _widened, (args, kwargs))
        return func(*args, **kwargs)


def _in_checkpoint() -> bool:
    """Whether what runs here may be run again in the backward pass: by torch's checkpoints of both kinds."""
    return not torch.is_grad_enabled() or torch._C._autograd._top_saved_tensors_default_hooks(True) is not None


def _widened(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor


def _kind(arguments: Any) -> Any:
    """Differs where a forward may take another way: by what is given, by flags and words, not by sizes and numbers."""
    leaves, tree = pytree.tree_flatten(arguments)
    return tree, tuple(leaf if isinstance(leaf, bool | str | None) else type(leaf) for leaf in leaves)
