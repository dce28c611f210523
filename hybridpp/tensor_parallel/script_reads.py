"""What a script may make, between steps, of weights and gradients of which this rank has a part.

Functions that take several elements of a shard together are refused, and those that fill it with random numbers, which
ranks draw alike, or by its shape. Where a rank has stages, each of its weights and gradients is whole, and a script
that makes something of all of them, or draws random numbers for them, learns that there are others.
"""

import copy
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, NamedTuple, NoReturn, TypeGuard, cast

from torch import Tensor, nn

from hybridpp.cluster import get_dist_logger
from hybridpp.code_owner import CodeOwner, code_owner
from hybridpp.errors import ConfigError
from hybridpp.nn.torch_private import CALL, TENSOR_METHODS, DisableTorchFunctionSubclass, pytree
from hybridpp.tensor_parallel.parameter_sharding import ParameterSharding, sharding_of

# By name, as a function and a method of torch have one. Those of torch.linalg begin with linalg_, but for Python's.
_TOGETHER_NAMES = """
    norm sum nansum mean nanmean std var std_mean var_mean prod amax amin aminmax argmax argmin median
    nanmedian mode quantile nanquantile kthvalue topk sort argsort msort renorm renorm_ logsumexp softmax
    log_softmax softmin gumbel_softmax cumsum cumsum_ cumprod cumprod_ logcumsumexp cummax cummin
    count_nonzero histc histogram unique unique_consecutive bincount norm_except_dim dist cdist pdist trace
    dot vdot inner outer ger matmul mm mv bmm addmm addmm_ addmv addmv_ addr addbmm baddbmm einsum tensordot
    chain_matmul linear bilinear conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d
    embedding embedding_bag cov corrcoef layer_norm rms_norm group_norm instance_norm batch_norm normalize
    cosine_similarity pairwise_distance svd svd_lowrank pca_lowrank lobpcg qr pinverse det logdet slogdet
    inverse cholesky matrix_power matrix_exp mse_loss l1_loss smooth_l1_loss huber_loss kl_div __matmul__
    __rmatmul__ _foreach_norm _foreach_max
"""
_TOGETHER = frozenset(_TOGETHER_NAMES.split())
# What they make or write is random, or goes by the place in the tensor.
_DRAWN_NAMES = """
    normal normal_ uniform_ bernoulli bernoulli_ exponential_ cauchy_ log_normal_ geometric_ random_ rand randn
    randint rand_like randn_like randint_like poisson binomial multinomial dropout dropout_ dropout1d dropout2d
    dropout3d alpha_dropout alpha_dropout_ feature_dropout feature_dropout_ feature_alpha_dropout
    feature_alpha_dropout_ native_dropout rrelu rrelu_ eye fill_diagonal_ diag diagonal diagflat tril tril_ triu triu_
"""
_DRAWN = frozenset(_DRAWN_NAMES.split())
# Functions of torch.nn.init that fill every shard as they fill the whole.
_FILLS = frozenset(("constant_", "zeros_", "ones_"))
# Of two tensors, they take pairs of elements.
_OF_ONE = frozenset(("max", "min"))
# What they make has one element for each of the weight, in its order or another, or a part of these.
_EACH_NAMES = """
    detach alias view view_as reshape reshape_as flatten ravel unflatten t transpose permute swapaxes
    swapdims movedim moveaxis squeeze unsqueeze unbind narrow select chunk split tensor_split contiguous
    expand __getitem__ float double half bfloat16 abs absolute __abs__ neg negative __neg__ pow __pow__
    square sqrt rsqrt reciprocal sign exp log log1p sigmoid tanh relu clamp clip clamp_min clamp_max
    nan_to_num mul multiply __mul__ __rmul__ div divide true_divide __truediv__ __div__ __rdiv__ __rtruediv__
    add __add__ __radd__ sub subtract __sub__ __rsub__ rsub lerp where addcmul addcdiv eq ne lt le gt ge
    __eq__ __ne__ __lt__ __le__ __gt__ __ge__ cat concat stack
"""
_EACH = frozenset(_EACH_NAMES.split())
_GETTERS = frozenset(getattr(Tensor, name).__get__ for name in ("data", "T", "mT"))
_SET_GRAD = cast(Any, Tensor.grad).__set__  # torch declares no property
_OF_TENSOR = cast(Any, Tensor.__torch_function__).__func__
# Torch's own parts of an operation, between the call and whoever made it.
_PARTS = frozenset(
    ("torch.overrides", TENSOR_METHODS, "torch.functional", "torch.nn.functional", "torch.nn.utils.convert_parameters")
)


class _Notice:
    """Tells a script, once, that all weights or gradients that it has read are those of one rank.

    Args:
        text: for functions that take the elements of each together.
        drawn: called with the name of a function that draws random numbers for one.

    Attributes:
        left: those that it has not read since the library ran last, by their parameters' ids.
    """

    def __init__(self, text: str, drawn: Callable[[str], None]):
        self.left: frozenset[int] = frozenset()
        self._text: str | None = text
        self.drawn = drawn

    def note(self, parts: frozenset[int], function: str) -> None:
        """A function of torch takes the elements of each of these together."""
        if not self.left or self._text is None:
            return
        self.left -= parts
        if not self.left:
            get_dist_logger().warning(self._text.format(function=function.strip("_")))
            self._text = None


class _Source(NamedTuple):
    """What a watched tensor is, or was made of.

    Attributes:
        sharding: of the weight, of which it is a shard; None: the rank has the whole weight.
        is_gradient: whether it is one.
        parts: the parameters' ids.
        notice: who learns of functions of it; None: they are refused.
    """

    sharding: ParameterSharding | None
    is_gradient: bool
    parts: frozenset[int] = frozenset()
    notice: _Notice | None = None


def _run(kinds: Iterable[type], func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run a function of torch whose arguments include a watched tensor."""
    if any(kind not in _KINDS and _has_own_function(kind) for kind in kinds):  # which may have more to say
        return NotImplemented
    name = getattr(func, "__name__", "")
    if _takes_together(name, func, args, kwargs) and _is_of_script():
        for source in _sources(args, kwargs):
            if source.notice is None:
                _refuse(source, name)
            source.notice.note(source.parts, name)
    drawn = _init_function(sys._getframe(2)) or (name if name in _DRAWN else "")
    if drawn and _is_of_script():
        for source in _sources(args, kwargs):
            if source.sharding is not None:
                _refuse_drawn(source, source.sharding, drawn)
            if source.notice is not None:
                source.notice.drawn(drawn)
    with DisableTorchFunctionSubclass():
        if func == _SET_GRAD and type(args[1]) is WatchedTensor:
            _plain(args[1])
        made = func(*args, **kwargs)
        if (name in _EACH or func in _GETTERS) and not _is_of_library(sys._getframe(2)):
            joined = _joined(_sources(args, kwargs))
            for one in made if isinstance(made, tuple | list) else (made,):
                if type(one) is Tensor and one.dim():
                    _watch(one, WatchedTensor, joined)
    return made


def _has_own_function(kind: Any) -> bool:
    # That of torch's own classes is a method, but for parameters, where torch disables it.
    function = getattr(kind.__torch_function__, "__func__", None)
    return function not in (None, _OF_TENSOR)


def _takes_together(name: str, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    if name in _OF_ONE:
        return not isinstance(args[1] if len(args) > 1 else kwargs.get("other"), Tensor)
    if name in _TOGETHER or name.startswith("linalg_"):
        return True
    return getattr(func, "__module__", "") == "torch.linalg"


def _init_function(frame: FrameType | None) -> str:
    """Which function of torch.nn.init runs the operation that ``frame`` calls; empty: none, or one of one number."""
    found = ""
    while frame is not None and (module := frame.f_globals.get("__name__")) in (*_PARTS, nn.init.__name__):
        if module == nn.init.__name__ and frame.f_code.co_name != "deprecated_init":
            found = frame.f_code.co_name
        frame = frame.f_back
    return f"nn.init.{found}" if found and found not in _FILLS else ""


def _sources(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[_Source]:
    """Of the watched arguments, shards first."""
    found = [one.source for one in pytree.tree_leaves((args, kwargs)) if type(one) in _KINDS]
    return sorted(found, key=lambda source: source.sharding is None)


def _joined(sources: list[_Source]) -> _Source:
    """Of what is made of these, of which the first one counts."""
    first = sources[0]
    return first._replace(parts=frozenset[int]().union(*(one.parts for one in sources if one.notice is first.notice)))


def _refuse(source: _Source, function: str) -> NoReturn:
    sharding = source.sharding
    assert sharding is not None, "what is whole is not refused"
    name = sharding.name
    layer = name.rpartition(".")[0] or name
    keep = f'eep the layer whole (tensor_parallel_plan={{"{layer}": "replicated"}}), '
    join = "or use tp_size=1; code that joins the numbers of all ranks takes them of"
    if source.is_gradient:
        instead = (
            "Call optimizer.clip_grad_by_norm(max_norm), or optimizer.get_grad_norm(), which is of the complete "
            f"model's gradient; else k{keep}{join} parameter.grad.clone()."
        )
    else:
        instead = (
            f"K{keep}read the file of booster.save_model, which has whole weights, {join} parameter.detach().clone(). "
            "For a penalty in the loss, let the model's forward return it, or use weight_decay of the optimizer."
        )
    raise ConfigError(
        f"{name}{'.grad' if source.is_gradient else ''} is a shard: with tp_size > 1 this rank has "
        f"{sharding.local_shape} of its {sharding.full_shape}, and {function.strip('_')} takes elements together, so "
        f"it would be of this shard only. What is done to each element is right. {instead}"
    )


def _refuse_drawn(source: _Source, sharding: ParameterSharding, function: str) -> NoReturn:
    name = sharding.name
    layer = name.rpartition(".")[0] or name
    raise ConfigError(
        f"{name}{'.grad' if source.is_gradient else ''} is a shard: with tp_size > 1 this rank has "
        f"{sharding.local_shape} of its {sharding.full_shape}. {function} goes by the shape of the shard (fans, a "
        "diagonal), or draws alike on each rank, so the complete tensor would not be the one that it makes without "
        "tensor parallelism. Initialise before booster.boost; or make the tensor of shape "
        f"{sharding.full_shape} on the CPU with one generator, which all ranks seed alike, and load it on all ranks: "
        f'model.load_state_dict({{"{name}": tensor}}, strict=False), or booster.load_model. For noise in every step, '
        f'keep the layer whole (tensor_parallel_plan={{"{layer}": "replicated"}}), or use tp_size=1.'
    )


def _is_of_library(frame: FrameType | None) -> bool:
    """Whether this library or torch itself calls an operation, given the frame that called ``__torch_function__``."""
    while frame is not None and frame.f_globals.get("__name__") in _PARTS:
        frame = frame.f_back
    return frame is None or code_owner(frame.f_code.co_filename) in (CodeOwner.HYBRIDPP, CodeOwner.TORCH)


def _is_of_script() -> bool:
    """Whether neither this library, nor a module of the model, nor a comparison of torch's runs the operation."""
    frame: FrameType | None = sys._getframe(3)
    is_direct = True
    while frame is not None:
        module = str(frame.f_globals.get("__name__", ""))
        owner = code_owner(frame.f_code.co_filename)
        if owner is CodeOwner.TORCH:
            if module.startswith("torch.testing"):
                return False
            if frame.f_code.co_name == CALL and _has_parameters(frame.f_locals.get("self")):
                return False
        elif is_direct and owner is CodeOwner.HYBRIDPP:
            return False
        else:
            is_direct = False
        frame = frame.f_back
    return True


def _has_parameters(module: Any) -> bool:
    return isinstance(module, nn.Module) and next(module.parameters(), None) is not None


class WatchedTensor(Tensor):
    """A gradient between steps; and what a script has made of each element of one or of a weight: a view, squares.

    Attributes:
        source: what it was made of.
    """

    source: _Source

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return _run(types, func, args, kwargs or {})

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        memo[id(self)] = copied = cast(Tensor, copy.deepcopy(_alias(self), {}))
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _alias(self).__reduce_ex__(protocol)

    def __repr__(self, *, tensor_contents: Any = None) -> Any:  # type: ignore[override]  # torch's is untyped
        return _alias(self).__repr__(tensor_contents=tensor_contents)


class WatchedParameter(nn.Parameter):
    """A parameter between steps: a plain one becomes one where its class is set, and the other way round.

    Copies and files have plain ones.

    Attributes:
        source: what it is.
    """

    source: _Source

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return _run(types, func, args, kwargs or {})

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        if id(self) in memo:
            return cast(nn.Parameter, memo[id(self)])
        memo[id(self)] = copied = cast(nn.Parameter, copy.deepcopy(_alias_parameter(self), {}))
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        alias = _alias_parameter(self)
        vars(alias).update({name: value for name, value in vars(self).items() if name != "source"})
        return alias.__reduce_ex__(protocol)

    def __repr__(self, *, tensor_contents: Any = None) -> Any:  # type: ignore[override]  # torch's is untyped
        return repr(_alias_parameter(self))


# Weights of stages are watched so often one after another, in all calls of some steps, and then longer and longer not.
_NUM_IN_A_ROW = 16
_KINDS = frozenset((WatchedParameter, WatchedTensor))


def _alias(watched: Tensor) -> Any:
    """A plain tensor of the same memory, and with the same graph."""
    with DisableTorchFunctionSubclass():
        if watched.grad_fn is not None:
            return watched.view_as(watched)
        return watched.detach().requires_grad_(watched.requires_grad)


def _alias_parameter(watched: nn.Parameter) -> Any:
    with DisableTorchFunctionSubclass():
        return nn.Parameter(watched.detach(), watched.requires_grad)


def _watch(tensor: Tensor, kind: type[Tensor], source: _Source) -> None:
    made: Any = tensor
    made.__class__ = kind
    made.source = source


def _is_watched(tensor: Tensor) -> TypeGuard[WatchedTensor]:
    return type(tensor) is WatchedTensor


def _plain(tensor: Tensor, kind: type[Tensor] = Tensor) -> None:
    del vars(tensor)["source"]
    tensor.__class__ = kind


class ScriptReads:
    """Watches what scripts make of the shards and gradients of a rank that has a part of the model, between steps.

    Of a shard and of its gradient, functions that take several elements together are refused. Where ranks have stages,
    a script that has taken the elements of each gradient or weight together (the terms of a norm over all of them)
    is told once that the rank has no others, and one that draws random numbers for them that each rank draws its own.
    To keep steps fast, such weights are watched in some steps.

    In a step, all are plain: torch chooses its fast kernels for these only, and reads of any attribute of another class
    take microseconds.

    Args:
        parameters: of the rank.
        num_stages: of which the rank tells what a script reads; 1: of nothing.
        ends: whether weights of stages were watched long enough, where no gradient shows; called after the library ran.
        at_end: called once then.
    """

    def __init__(
        self,
        parameters: Iterable[nn.Parameter],
        num_stages: int = 1,
        ends: Callable[[], bool] = lambda: False,
        at_end: Callable[[], None] = lambda: None,
    ):
        self._ends, self._at_end, self._is_over = ends, at_end, False
        of_rank = f"of one rank, which with pp_size={num_stages} are those of its stages"
        only_here = (
            f"{of_rank}: each number is right, but a norm or a sum over all of them is not that of the complete model"
        )
        self._has_drawn = False
        self._drawn_text = (
            f"{{function}} drew random numbers for weights or gradients {of_rank}: ranks that are seeded alike draw "
            "the same numbers for different weights, and not those of one process. Draw those of each weight with a "
            "generator of its own, seeded by its name and the step: "
            "torch.Generator().manual_seed(zlib.crc32(name.encode()) + step)."
        )
        self._notice = _Notice(
            f"{{function}} and the like were taken of all gradients {only_here}. optimizer.get_grad_norm(), which "
            "every rank calls, is, and optimizer.clip_grad_by_norm(max_norm) clips by it.",
            self._drawn,
        )
        self._of_weights = _Notice(
            f"{{function}} and the like were taken of all weights {only_here}. Add up the ranks' numbers with "
            "torch.distributed.all_reduce over plugin.pp_group; let the model's forward compute a penalty in the loss, "
            "or use weight_decay of the optimizer.",
            self._drawn,
        )
        self._num_watched = 0
        self._unsharded: list[tuple[nn.Parameter, _Source]] = []
        self._shards: list[tuple[nn.Parameter, _Source]] = []
        self._of_gradients: list[tuple[nn.Parameter, _Source]] = []
        for one in parameters:
            sharding = sharding_of(one)
            if sharding is not None and sharding.local_shape != sharding.full_shape:
                self._shards.append((one, _Source(sharding, is_gradient=False)))
                self._of_gradients.append((one, _Source(sharding, is_gradient=True)))
            elif num_stages > 1:
                source = _Source(None, is_gradient=True, parts=frozenset((id(one),)), notice=self._notice)
                self._of_gradients.append((one, source))
                self._unsharded.append((one, source._replace(is_gradient=False, notice=self._of_weights)))
        self._gradients: list[Tensor] = []
        self._depth = 0

    @property
    def has_parts(self) -> bool:
        """Whether there is anything to watch."""
        return bool(self._of_gradients)

    def watch(self) -> None:
        """Begin to watch what is there."""
        if self._depth or self._is_over:
            return
        with DisableTorchFunctionSubclass():
            for parameter, source in self._of_gradients:
                gradient = parameter.grad
                if type(gradient) is Tensor:
                    _watch(gradient, WatchedTensor, source)
                    self._gradients.append(gradient)
        num_blocks = self._num_watched // _NUM_IN_A_ROW
        is_due = not num_blocks & (num_blocks - 1)
        for parameter, source in (*self._shards, *(self._unsharded if is_due else ())):
            if type(parameter) is nn.Parameter:
                _watch(parameter, WatchedParameter, source)
        self._num_watched += 1
        trained = frozenset(id(one) for one, _ in self._unsharded if one.requires_grad)
        self._of_weights.left = trained if is_due else frozenset()
        self._notice.left = frozenset[int]().union(*(one.source.parts for one in self._gradients if _is_watched(one)))

    def end_watch(self) -> None:
        """Make plain tensors of all again."""
        for gradient in self._gradients:
            if _is_watched(gradient):
                _plain(gradient)
        self._gradients.clear()
        # Weights of stages are watched seldom, and all of them then.
        is_watched = bool(self._unsharded) and type(self._unsharded[0][0]) is WatchedParameter
        for parameter, _ in (*self._shards, *(self._unsharded if is_watched else ())):
            if type(parameter) is WatchedParameter:
                _plain(parameter, nn.Parameter)

    def _drawn(self, function: str) -> None:
        """Tell, once, of random numbers for what this rank has."""
        if not self._has_drawn:
            self._has_drawn = True
            get_dist_logger().warning(self._drawn_text.format(function=function.strip("_")))

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Inside, weights that are there only now are watched, too; afterwards none is, until :meth:`watch`."""
        self.watch()
        try:
            yield
        finally:
            self.end_watch()

    @contextmanager
    def plain(self) -> Iterator[None]:
        """Inside, which may be nested, the library runs: all are plain."""
        if not self._depth:
            self.end_watch()
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1
            if not self._depth and not self._shards and self._ends():
                self._is_over = True
                self._at_end()
            elif not self._depth:
                self.watch()

    def around(self, inner: Callable[..., Any] | None) -> Callable[..., Any]:
        """A wrapper of the script's own calls of the model, which copies share; ``inner`` wraps them inside."""

        def run(forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            with self.plain():
                return inner(forward, args, kwargs) if inner else forward(*args, **kwargs)

        return run
