"""Operations that read a weight while none of the modules runs that may read it."""

import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from types import FrameType
from typing import Any

from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from hybridpp.code_owner import CodeOwner, code_owner
from hybridpp.nn import walk
from hybridpp.nn.metadata_functions import METADATA_FUNCTIONS
from hybridpp.nn.torch_private import FakeTensor, pytree
from hybridpp.nn.watcher import with_lost_weight

_SHAPE, _GRAD = (getattr(Tensor, name).__get__ for name in ("shape", "grad"))
_SIZES = frozenset({Tensor.size, Tensor.numel, Tensor.nelement, Tensor.stride, Tensor.__len__, _SHAPE})
# What says nothing of the values of a weight.
_STATE = METADATA_FUNCTIONS - _SIZES | {Tensor.requires_grad_, Tensor.data_ptr, _GRAD}
# Operations on each element by itself do to shards what they do to the complete weight.
_WRITES = frozenset(
    {Tensor.clamp_, Tensor.clamp_min_, Tensor.clamp_max_, Tensor.mul_, Tensor.add_, Tensor.sub_, Tensor.div_}
    | {Tensor.zero_, Tensor.fill_}
)


class WeightReads:
    """Watches runs of a model for operations that read its weights from outside of the modules that may.

    Args:
        model: that runs.
        readers: the modules that may read a weight while they run, by its name.
        note: called with the name of a weight that something else reads.
        with_sizes: whether its sizes count, too.
    """

    def __init__(
        self,
        model: nn.Module,
        readers: Mapping[str, Collection[nn.Module]],
        note: Callable[[str], None],
        *,
        with_sizes: bool = False,
    ):
        self._model, self._readers, self._note = model, readers, note
        self._with_sizes = with_sizes
        self._names: dict[int, str] = {}
        self._running: dict[nn.Module, int] = {}

    @contextmanager
    def watched(self, *, is_running: bool = False) -> Iterator[None]:
        """Inside, operations are watched; the hooks that note which modules run are taken off afterwards.

        Args:
            is_running: whether the model has been called already; else only what happens in calls inside counts.
        """
        modules = dict.fromkeys([self._model, *(module for readers in self._readers.values() for module in readers)])
        self._running = dict.fromkeys(modules, 0)
        self._running[self._model] = int(is_running)
        self._find()
        # While a meta model is traced, it has other tensors.
        hooks = [self._model.register_forward_pre_hook(lambda *_: self._find(), prepend=True)]
        for module in modules:
            hooks.append(module.register_forward_pre_hook(partial(_count, self._running, 1), prepend=True))
            hooks.append(module.register_forward_hook(partial(_count, self._running, -1), always_call=True))
        try:
            with _Reads(self._see):
                yield
        finally:
            for hook in hooks:
                hook.remove()

    def _find(self) -> None:
        named = walk.named_parameters(self._model)
        self._names = {id(parameter): name for name, parameter in named if name in self._readers}

    def _see(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not self._running[self._model]:
            return
        if getattr(func, "__name__", "") == "__set__":  # another ``.data``, as where weights are gathered
            args = args[1:]
        if (
            func in _STATE
            or (func in _SIZES and not self._with_sizes)
            or (func in _WRITES and not any(_is_tensor(leaf) for leaf in args[1:]))
        ):
            return
        for leaf in pytree.tree_leaves((args, kwargs)):
            name = self._names.get(id(leaf)) if isinstance(leaf, Tensor) else None
            if name is None or any(self._running[module] for module in self._readers[name]):
                continue
            # A trace reads sizes itself.
            if not (func in _SIZES and isinstance(leaf, FakeTensor)) and not _is_of_library():
                self._note(name)


class _Reads(TorchFunctionMode):
    def __init__(self, see: Callable[[Any, tuple[Any, ...], dict[str, Any]], None]):
        super().__init__()
        self._see = see

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = with_lost_weight(func, kwargs or {})
        self._see(func, args, kwargs)
        return func(*args, **kwargs)


def _is_of_library() -> bool:
    """Whether this library calls the operation that is seen now, as where weights are gathered or looked at for NaN."""
    frame: FrameType | None = sys._getframe(2)
    is_own = False
    while frame is not None:
        owner = code_owner(frame.f_code.co_filename)
        if frame.f_code.co_name == "__torch_function__":
            is_own = False  # what was between is another mode, for whoever called that
        elif owner is CodeOwner.HYBRIDPP:
            is_own = True
        elif owner is not CodeOwner.TORCH:
            break
        frame = frame.f_back
    return is_own


def _is_tensor(value: Any) -> bool:
    return isinstance(value, Tensor) and value.ndim > 0


def _count(running: dict[nn.Module, int], step: int, module: nn.Module, *_: Any) -> None:
    running[module] += step
