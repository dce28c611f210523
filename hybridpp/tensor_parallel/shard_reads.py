"""Refuse functions of the script's that take several elements of a weight together of which this rank has a shard."""

import copy
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, NoReturn, cast

from torch import Tensor, nn

from hybridpp.errors import ConfigError
from hybridpp.nn.names import LIBRARIES, OWN_PACKAGES
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


def _run(kinds: Iterable[type], func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run a function of torch whose arguments include a shard."""
    if any(kind not in _KINDS and _has_own_function(kind) for kind in kinds):  # which may have more to say
        return NotImplemented
    name = getattr(func, "__name__", "")
    if _takes_together(name, func, args, kwargs) and _is_of_script():
        _refuse(_shard_in(args, kwargs), name)
    with DisableTorchFunctionSubclass():
        if func == _SET_GRAD and type(args[1]) is ShardTensor:
            _plain(args[1])
        made = func(*args, **kwargs)
        if (name in _EACH or func in _GETTERS) and not _is_of_library(sys._getframe(2)):
            sharding = _shard_in(args, kwargs)
            for one in made if isinstance(made, tuple | list) else (made,):
                if type(one) is Tensor and one.dim():
                    _note(one, ShardTensor, sharding)
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


def _shard_in(args: tuple[Any, ...], kwargs: dict[str, Any]) -> ParameterSharding:
    """How the first argument that is a shard is divided."""
    for one in args[:1] if args and type(args[0]) in _KINDS else pytree.tree_leaves((args, kwargs)):
        if type(one) is ShardParameter:
            return cast(ParameterSharding, sharding_of(one))
        if type(one) is ShardTensor:
            return one.sharding
    raise AssertionError("an argument is a shard")


def _refuse(sharding: ParameterSharding, function: str) -> NoReturn:
    name = sharding.name
    layer = name.rpartition(".")[0] or name
    raise ConfigError(
        f"{name} is a shard: with tp_size > 1 this rank has {sharding.local_shape} of its {sharding.full_shape}, and "
        f"{function.strip('_')} takes elements together, so it would be of this shard only. What is done to each "
        f'element is right. Keep the layer whole (tensor_parallel_plan={{"{layer}": "replicated"}}), read the file of '
        "booster.save_model, which has whole weights, or use tp_size=1; code that joins the numbers of all ranks takes "
        "them of parameter.detach().clone(). For a penalty in the loss, let the model's forward return it, or use "
        "weight_decay of the optimizer."
    )


def _is_of_library(frame: FrameType | None) -> bool:
    """Whether this library or torch itself calls an operation, given the frame that called ``__torch_function__``."""
    while frame is not None and frame.f_globals.get("__name__") in _PARTS:
        frame = frame.f_back
    return frame is None or str(frame.f_globals.get("__name__", "")).partition(".")[0] in LIBRARIES


def _is_of_script() -> bool:
    """Whether neither this library, nor a module of the model, nor a comparison of torch's runs the operation."""
    frame: FrameType | None = sys._getframe(3)
    is_direct = True
    while frame is not None:
        module = str(frame.f_globals.get("__name__", ""))
        package = module.partition(".")[0]
        if package == "torch":
            if module.startswith("torch.testing"):
                return False
            if frame.f_code.co_name == CALL and _has_parameters(frame.f_locals.get("self")):
                return False
        elif is_direct and package in OWN_PACKAGES:
            return False
        else:
            is_direct = False
        frame = frame.f_back
    return True


def _has_parameters(module: Any) -> bool:
    return isinstance(module, nn.Module) and next(module.parameters(), None) is not None


class ShardTensor(Tensor):
    """What a script has made of each element of a shard: its ``data``, a view, its squares.

    Attributes:
        sharding: of the weight.
    """

    sharding: ParameterSharding

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


class ShardParameter(nn.Parameter):
    """A sharded parameter, between steps: a plain one becomes one where its class is set, and the other way round.

    Copies and files have plain ones.
    """

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
        vars(alias).update(vars(self))
        return alias.__reduce_ex__(protocol)

    def __repr__(self, *, tensor_contents: Any = None) -> Any:  # type: ignore[override]  # torch's is untyped
        return repr(_alias_parameter(self))


_KINDS = frozenset((ShardParameter, ShardTensor))


def _alias(shard: Tensor) -> Any:
    """A plain tensor of the same memory, and with the same graph."""
    with DisableTorchFunctionSubclass():
        if shard.grad_fn is not None:
            return shard.view_as(shard)
        return shard.detach().requires_grad_(shard.requires_grad)


def _alias_parameter(shard: nn.Parameter) -> Any:
    with DisableTorchFunctionSubclass():
        return nn.Parameter(shard.detach(), shard.requires_grad)


def _note(tensor: Tensor, kind: type[Tensor], sharding: ParameterSharding) -> None:
    made: Any = tensor
    made.__class__ = kind
    made.sharding = sharding


def _plain(tensor: Tensor) -> None:
    del vars(tensor)["sharding"]
    tensor.__class__ = Tensor


class ShardReads:
    """Lets scripts read shards of weights element by element only, between steps.

    In a step, weights are plain parameters: torch chooses its fast kernels for these only, and reads of any attribute
    of another class take microseconds.

    Args:
        parameters: of the model; what is not sharded is left alone.
    """

    def __init__(self, parameters: Iterable[nn.Parameter]):
        self._shards = [
            one
            for one in parameters
            if (sharding := sharding_of(one)) is not None and sharding.local_shape != sharding.full_shape
        ]
        self._depth = 0

    @property
    def has_shards(self) -> bool:
        """Whether there is any."""
        return bool(self._shards)

    def watch(self) -> None:
        """Begin to refuse functions of the shards that are there."""
        for shard in () if self._depth else self._shards:
            if type(shard) is nn.Parameter:
                shard.__class__ = ShardParameter

    def end_watch(self) -> None:
        """Make plain parameters of them again."""
        for shard in self._shards:
            if type(shard) is ShardParameter:
                shard.__class__ = nn.Parameter  # type: ignore[assignment]  # what it was

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Inside, shards that are there only now are watched, too; afterwards none is, until :meth:`watch`."""
        self.watch()
        try:
            yield
        finally:
            self.end_watch()

    @contextmanager
    def plain(self) -> Iterator[None]:
        """Inside, which may be nested, the library runs: shards are plain parameters."""
        if not self._depth:
            self.end_watch()
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1
            if not self._depth:
                self.watch()

    def around(self, inner: Callable[..., Any] | None) -> Callable[..., Any]:
        """A wrapper of the script's own calls of the model, which copies share; ``inner`` wraps them inside."""

        def run(forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            with self.plain():
                return inner(forward, args, kwargs) if inner else forward(*args, **kwargs)

        return run
