"""Casts of the arguments of loss functions and of mixed-dtype calls in the forward of a half-precision model."""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from hybridpp.module_adapter import AdapterLayer, ModuleAdapter
from hybridpp.nn import walk
from hybridpp.nn.checkpointing import may_run_again
from hybridpp.nn.deferred_tensor import DeferredTensor
from hybridpp.nn.torch_private import current_function_mode, pop_function_mode, push_function_mode, pytree
from hybridpp.nn.watcher import with_lost_weight
from hybridpp.precision.loss_functions import LOSS_FUNCTIONS, widened_arguments
from hybridpp.precision.mixed_dtype_rules import MIXED_DTYPE_RULES, CastRule

_Forward = Callable[..., Any]

# In evaluation these use a fused kernel that refuses fp32 inputs with half-precision weights; a function mode disables
# the kernel.
_WITH_KERNELS = (nn.TransformerEncoderLayer, nn.MultiheadAttention)


class CastsSeen(NamedTuple):
    """Where complete forwards call functions whose arguments are cast.

    Attributes:
        kinds: of the arguments of those forwards.
        callers: classes of units that call such functions.
        in_container_code: whether container code does.
        is_repeated: whether container code does where the backward pass may run it again.
    """

    kinds: frozenset[Any]
    callers: frozenset[type]
    in_container_code: bool
    is_repeated: bool


class _Kinds(set[Any]):
    """Kinds of calls. They hold pytree specs, which cannot change, and which torch warns of where they are copied."""

    def __deepcopy__(self, memo: dict[int, Any]) -> "_Kinds":
        return _Kinds(self)


class FunctionCasts:
    """Casts the arguments of some torch functions that a model calls.

    Loss functions get fp32 arguments, so the loss and everything computed from it are fp32. Functions that refuse
    arguments of mixed dtypes (``mixed_dtype_rules.py``) get arguments of one dtype.

    A torch function mode intercepts the calls. It adds a microsecond to every call of torch, so it is on for a complete
    forward only if the kind of the arguments is new. Later it is on only where such a call was seen: in container code,
    or in units of the same class. Other units cost one set look-up each.

    A mode applies to one thread; other threads are not affected.

    Args:
        adapter: of the model, which is in half precision and not yet cut.
        units: names of its units, as fine as possible.
        fp32_losses: whether to cast the arguments of loss functions.
        compiled: those of its modules whose forwards are compiled. The mode is always on there: it costs compiled code
            nothing, and with and without it would be two graphs.
    """

    def __init__(
        self,
        adapter: ModuleAdapter,
        units: Iterable[str],
        fp32_losses: bool = True,
        compiled: Collection[nn.Module] = (),
    ):
        self._mode = _Mode(
            {**MIXED_DTYPE_RULES, **(dict.fromkeys(LOSS_FUNCTIONS, widened_arguments) if fp32_losses else {})},
            self._note,
        )
        self._known = _Kinds()
        self._callers: set[type] = set()
        self._in_container_code = False
        self._is_repeated = False
        self._everywhere = False
        self._unit: type | None = None
        self._with_kernels: set[type] = set()
        model = adapter.model
        for module in {id(module): module for module in map(model.get_submodule, units)}.values():
            if any(isinstance(part, _WITH_KERNELS) for part in walk.modules(module)):
                self._with_kernels.add(type(module))
            if module in compiled:
                self._callers.add(type(module))
            adapter.wrap(module, AdapterLayer.FUNCTION_DTYPES, self._run_unit, type(module))
        adapter.wrap(model, AdapterLayer.FUNCTION_DTYPES, self._run_model, model)

    def learned(self) -> CastsSeen:
        """What complete forwards have shown so far."""
        return CastsSeen(frozenset(self._known), frozenset(self._callers), self._in_container_code, self._is_repeated)

    def learn(self, seen: CastsSeen) -> None:
        """Take over what a complete forward of an equal model has shown on another rank."""
        self._known |= seen.kinds
        self._callers |= seen.callers
        self._in_container_code |= seen.in_container_code
        self._is_repeated |= seen.is_repeated

    def _note(self) -> None:
        if self._unit is None:
            self._in_container_code = True
            self._is_repeated |= may_run_again()
        else:
            self._callers.add(self._unit)

    def _run_model(self, model: nn.Module, forward: _Forward, /, *args: Any, **kwargs: Any) -> Any:
        kind = (model.training, _kind((args, kwargs)))
        is_known = kind in self._known
        if is_known and not self._in_container_code:
            return forward(*args, **kwargs)
        before, self._everywhere = self._everywhere, not is_known
        try:
            with self._mode:
                result = forward(*args, **kwargs)
        finally:
            self._everywhere = before
        # Not reached where a stage leaves the forward early: only a complete forward, as in a trace, shows all calls.
        self._known.add(kind)
        return result

    def _run_unit(self, kind: type, forward: _Forward, /, *args: Any, **kwargs: Any) -> Any:
        wanted = kind in self._callers or self._everywhere
        is_on = current_function_mode() is self._mode  # type: ignore[no-untyped-call]  # torch
        if not wanted:
            return self._run_outside(forward, *args, **kwargs) if is_on else forward(*args, **kwargs)
        if kind in self._with_kernels and _holds_fp32((args, kwargs)):
            self._callers.add(kind)
        before, self._unit = self._unit, kind
        try:
            with nullcontext() if is_on else self._mode:
                return forward(*args, **kwargs)
        finally:
            self._unit = before

    def _run_outside(self, forward: _Forward, /, *args: Any, **kwargs: Any) -> Any:
        pop_function_mode()  # type: ignore[no-untyped-call]  # torch
        try:
            return forward(*args, **kwargs)
        finally:
            push_function_mode(self._mode)  # type: ignore[no-untyped-call]  # torch

    @contextmanager
    def recompute_context(self) -> Iterator[None]:
        """A context for the backward pass, in which recomputed container code casts as it did in the forward."""
        with self._mode if self._is_repeated else nullcontext():
            yield


class _Mode(TorchFunctionMode):
    def __init__(self, rules: Mapping[Any, CastRule], note: Callable[[], None]):
        super().__init__()
        self._rules, self._note = rules, note

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = with_lost_weight(func, kwargs or {})
        rule = self._rules.get(func)
        changed = None if rule is None else rule(args, kwargs)
        if changed is not None:
            self._note()
            args, kwargs = changed
        return func(*args, **kwargs)


def _holds_fp32(arguments: Any) -> bool:
    return any(isinstance(leaf, Tensor) and leaf.dtype is torch.float32 for leaf in pytree.tree_leaves(arguments))


def _kind(arguments: Any) -> Any:
    """A key of the arguments' structure, types, flags and strings, on which the path of a forward may depend.

    Shapes and numbers are not part of it.
    """
    leaves, tree = pytree.tree_flatten(arguments)
    return tree, tuple(leaf if isinstance(leaf, bool | str | None) else _type(leaf) for leaf in leaves)


def _type(leaf: Any) -> type:
    return Tensor if type(leaf) is DeferredTensor else type(leaf)
