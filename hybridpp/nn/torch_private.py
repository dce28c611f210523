"""Every private name of torch that hybridpp uses, as it is in torch 2.13.0.

Another release may change any of them: when the tests move on to it, read these again first. No other file has one
(``tests/nn/test_torch_private.py``). What counts as private is each module, class, function and attribute of torch's
whose name begins with one underscore, and what only such a module holds (``FakeTensor``). Not counted: names with two
underscores (``__torch_function__``), and a method that a subclass of ours overrides (``HybridAdam._init_group``).

Names are either torch's own, without the underscore, or functions that read one attribute. Those are
``operator.attrgetter`` objects, about 30 ns more than the attribute itself, because layers read them at every call.
"""

import json
import logging
from collections.abc import Callable, Mapping, MutableMapping
from datetime import timedelta
from functools import cache, partial
from multiprocessing.process import BaseProcess
from operator import attrgetter, methodcaller
from types import MappingProxyType
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
import torch.nn.modules.module as module_globals
from torch import Tensor, nn
from torch import _has_compatible_shallow_copy_type as has_compatible_memory
from torch._C import (
    DisableTorchFunction,
    DisableTorchFunctionSubclass,
    DispatchKey,
    TensorBase,
    _are_functorch_transforms_active,
    _current_graph_task_id,
    _functorch,
    _is_any_autocast_enabled,
    _will_engine_execute_node,
)
from torch._C._autograd import _top_saved_tensors_default_hooks
from torch._C._distributed_c10d import HashStore, PrefixStore, Store, TCPStore
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    UnsupportedOperatorException,
)
from torch.autograd.graph import get_gradient_edge
from torch.nn.modules.batchnorm import _BatchNorm as BatchNorm
from torch.nn.modules.batchnorm import _NormBase as NormWithStatistics
from torch.nn.modules.conv import _ConvNd as ConvNd
from torch.nn.modules.instancenorm import _InstanceNorm as InstanceNorm
from torch.nn.modules.module import _WrappedHook as WrappedLoadHook
from torch.optim.optimizer import _global_optimizer_pre_hooks as GLOBAL_STEP_PRE_HOOKS
from torch.overrides import _get_current_function_mode as current_function_mode
from torch.overrides import _pop_mode as pop_function_mode
from torch.overrides import _push_mode as push_function_mode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data.dataloader import _BaseDataLoaderIter as BaseDataLoaderIter

__all__ = [
    "APPLY",
    "ATTENTION_BACKWARD_OPS",
    "ATTENTION_OPS",
    "BUFFERS",
    "CALL",
    "COMPILED_CALL",
    "FAKE_TENSOR_LOG",
    "GLOBAL_FORWARD_HOOKS",
    "GLOBAL_FORWARD_PRE_HOOKS",
    "GLOBAL_STEP_PRE_HOOKS",
    "GROUPED_MM",
    "PARAMETERS",
    "READ_SCALAR",
    "TENSOR_METHODS",
    "VERSION",
    "BatchNorm",
    "ConvNd",
    "DataDependentOutputException",
    "DisableTorchFunction",
    "DisableTorchFunctionSubclass",
    "DynamicOutputShapeException",
    "FakeMode",
    "FakeSpec",
    "FakeTensor",
    "FakeTensorMode",
    "HashStore",
    "InstanceNorm",
    "NormWithStatistics",
    "OpOverload",
    "PrefixStore",
    "Store",
    "TCPStore",
    "TensorBase",
    "TorchDispatchMode",
    "UnsupportedOperatorException",
    "WrappedLoadHook",
    "accumulated_hooks_of",
    "active_nccl_calls",
    "address_of_store",
    "apply_of_class",
    "apply_to_tensors",
    "assert_async",
    "backward_hooks_of",
    "base_of",
    "buffers_of",
    "call_after_backward",
    "call_of",
    "children_of",
    "compiled_call_of",
    "connection_of",
    "conv_forward",
    "current_function_mode",
    "current_graph_task_id",
    "dataset_of",
    "default_store",
    "drop_accumulated_hooks",
    "efficient_attention",
    "flash_attention",
    "foreach_add_",
    "foreach_copy_",
    "foreach_norm",
    "forget_flat_weights",
    "forward_hooks_of",
    "forward_pre_hooks_of",
    "function_of",
    "gradient_hooks_of_module",
    "grouped_product_without_values",
    "has_compatible_memory",
    "has_no_data",
    "index_sampler_of",
    "is_any_autocast_enabled",
    "is_composite",
    "is_functorch_active",
    "is_in_running_backward",
    "is_view",
    "make_wrapper_subclass",
    "moves_nothing",
    "nccl_options",
    "num_workers_of",
    "parameters_of",
    "place_of",
    "pop_function_mode",
    "push_function_mode",
    "pytree",
    "register_hooks_again",
    "remake_flat_weights",
    "saved_tensor_hooks",
    "schema_of",
    "step_post_hooks_of",
    "step_pre_hooks_of",
    "storage_id",
    "takes_kwargs",
    "timeout_of",
    "transient_buffers_of",
    "unsafe_view",
    "unwrapped",
    "version_of",
    "version_or_none",
]

# A module. The dicts themselves: what is written to them is the module's.
PARAMETERS, BUFFERS = "_parameters", "_buffers"  # names of the attributes, where the dict is replaced
# All attributes of a module that hold its parts and its hooks.
HOLDERS = (
    PARAMETERS,
    BUFFERS,
    "_modules",
    "_forward_hooks",
    "_forward_pre_hooks",
    "_backward_hooks",
    "_backward_pre_hooks",
)
# The module of operators that scripts register, with their backward formulas.
REGISTERED_OPERATORS = "torch._library."
parameters_of: Callable[[nn.Module], dict[str, nn.Parameter | None]] = attrgetter(PARAMETERS)
buffers_of: Callable[[nn.Module], dict[str, Tensor | None]] = attrgetter(BUFFERS)
children_of: Callable[[nn.Module], dict[str, nn.Module | None]] = attrgetter("_modules")
transient_buffers_of: Callable[[nn.Module], set[str]] = attrgetter("_non_persistent_buffers_set")
forward_hooks_of: Callable[[nn.Module], dict[int, Callable[..., Any]]] = attrgetter("_forward_hooks")
forward_pre_hooks_of: Callable[[nn.Module], dict[int, Callable[..., Any]]] = attrgetter("_forward_pre_hooks")


def gradient_hooks_of_module(module: nn.Module) -> list[dict[int, Callable[..., Any]]]:
    """The hooks that are given gradients of a module's results: those behind its backward pass, and those before it."""
    full = [module._backward_hooks] if module._is_full_backward_hook else []
    return [*full, module._backward_pre_hooks]


# Names of the attributes that a call of a module goes through: with its hooks around ``forward``; as compiled in place.
CALL, COMPILED_CALL = "_call_impl", "_compiled_call_impl"
# The module of the methods of tensors that are written in Python.
TENSOR_METHODS = "torch._tensor"
call_of: Callable[[nn.Module], Callable[..., Any]] = attrgetter(CALL)
compiled_call_of: Callable[[nn.Module], Callable[..., Any] | None] = attrgetter(COMPILED_CALL)
conv_forward: Callable[[nn.Conv2d, Tensor, Tensor, Tensor | None], Tensor] = nn.Conv2d._conv_forward
GLOBAL_FORWARD_HOOKS: dict[int, Callable[..., Any]] = module_globals._global_forward_hooks
GLOBAL_FORWARD_PRE_HOOKS: dict[int, Callable[..., Any]] = module_globals._global_forward_pre_hooks

# What nodes of autograd's graph keep: the sizes that were reduced, how a loss was, and of what.
reduced_sizes_of: Callable[[Any], tuple[int, ...]] = attrgetter("_saved_self_sym_sizes")
loss_reduction_of: Callable[[Any], int] = attrgetter("_saved_reduction")
loss_input_of: Callable[[Any], Tensor] = attrgetter("_saved_self")
INPUT_METADATA = "_input_metadata"
function_of: Callable[[Any], type[torch.autograd.Function]] = attrgetter("_forward_cls")
"""The autograd function of a class of nodes."""

# A tensor. One that was made in inference mode has no version: reading it is an error (see version_or_none).
version_of: Callable[[Tensor], int] = attrgetter("_version")
VERSION: Any = vars(TensorBase)["_version"]  # the descriptor, as __torch_function__ is given it
backward_hooks_of: Callable[[Tensor], Mapping[int, Callable[..., Any]] | None] = attrgetter("_backward_hooks")
# After a gradient is accumulated; ``None`` until the first is registered.
accumulated_hooks_of: Callable[[Tensor], dict[int, Callable[..., Any]] | None] = attrgetter(
    "_post_accumulate_grad_hooks"
)


def register_hooks_again(tensor: Tensor) -> None:
    """Let autograd call the hooks of a tensor whose value was swapped: the dicts stay, what autograd knows does not."""
    for name in ("_post_accumulate_grad_hooks", "_backward_hooks"):
        hooks = vars(TensorBase)[name]
        if hooks.__get__(tensor) is not None:
            hooks.__set__(tensor, hooks.__get__(tensor))


def drop_accumulated_hooks(tensor: Tensor) -> None:
    """Let a tensor have no dict of these hooks any more, as before the first was registered."""
    vars(TensorBase)["_post_accumulate_grad_hooks"].__set__(tensor, None)


# An optimizer.
step_pre_hooks_of: Callable[[torch.optim.Optimizer], MutableMapping[int, Callable[..., Any]]] = attrgetter(
    "_optimizer_step_pre_hooks"
)
step_post_hooks_of: Callable[[torch.optim.Optimizer], MutableMapping[int, Callable[..., Any]]] = attrgetter(
    "_optimizer_step_post_hooks"
)

is_view: Callable[[Tensor], bool] = Tensor._is_view
make_wrapper_subclass: Callable[..., Tensor] = Tensor._make_wrapper_subclass

# Functions and operators.
foreach_norm, foreach_add_, foreach_copy_ = torch._foreach_norm, torch._foreach_add_, torch._foreach_copy_
assert_async = torch._assert_async
unsafe_view: Callable[[Tensor, torch.Size], Tensor] = torch.ops.aten._unsafe_view.default
# With the position of the argument ``is_causal``.
ATTENTION_OPS = {
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: 4,
    torch.ops.aten._scaled_dot_product_flash_attention: 4,
    torch.ops.aten._scaled_dot_product_efficient_attention: 6,
    torch.ops.aten._scaled_dot_product_cudnn_attention: 6,
}
ATTENTION_BACKWARD_OPS = {
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: 7,
    torch.ops.aten._scaled_dot_product_flash_attention_backward: 11,
    torch.ops.aten._scaled_dot_product_efficient_attention_backward: 11,
    torch.ops.aten._scaled_dot_product_cudnn_attention_backward: 14,
}
flash_attention: Callable[..., tuple[Any, ...]] = torch.ops.aten._scaled_dot_product_flash_attention.default
efficient_attention: Callable[..., tuple[Any, ...]] = torch.ops.aten._scaled_dot_product_efficient_attention.default
GROUPED_MM = torch.ops.aten._grouped_mm
# Operators whose results share memory with their argument, which their schema does not say.
_UNDECLARED_VIEWS = frozenset(
    {
        torch.ops.aten._unsafe_view.default,
        torch.ops.aten._reshape_alias.default,
        torch.ops.aten.lift_fresh.default,
        torch.ops.aten.lift.default,
    }
)
READ_SCALAR = torch.ops.aten._local_scalar_dense.default
schema_of: Callable[[OpOverload], Any] = attrgetter("_schema")


@cache
def moves_nothing(operator: Any) -> bool:
    """Whether an operator reads and writes no values: it only says which part of a memory a tensor shows, and how."""
    return isinstance(operator, OpOverload) and (
        operator.is_view or operator in _UNDECLARED_VIEWS or torch.Tag.inplace_view in operator.tags
    )


def is_composite(operator: OpOverload) -> bool:
    """Whether an operator is made of others for every kind of tensor (those of TorchScript are not dispatched)."""
    return operator.namespace != "prim" and operator.has_kernel_for_dispatch_key(DispatchKey.CompositeImplicitAutograd)


# Autograd, autocast, functorch.
current_graph_task_id = _current_graph_task_id


base_of: Callable[[Tensor], Tensor | None] = attrgetter("_base")
"""The tensor that a tensor is a view of; None: it is none."""


def is_in_running_backward(parameter: nn.Parameter) -> bool:
    """Whether the backward pass that runs on this thread will add to a parameter's gradient."""
    return parameter.requires_grad and bool(_will_engine_execute_node(get_gradient_edge(parameter).node))


def call_after_backward(callback: Callable[[], None]) -> None:
    """Call ``callback`` when the running backward pass ends."""
    torch.autograd.Variable._execution_engine.queue_callback(callback)


is_any_autocast_enabled = _is_any_autocast_enabled
is_functorch_active = _are_functorch_transforms_active

# The pack and unpack functions that autograd calls for what it saves here, if any.
saved_tensor_hooks: Callable[[], tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]] | None] = partial(
    _top_saved_tensors_default_hooks, False
)

# Logs each operator that fakes cannot run.
FAKE_TENSOR_LOG = logging.getLogger("torch._subclasses.fake_tensor")


def storage_id(tensor: Tensor) -> int:
    """The same for tensors that share memory, as long as one of them is alive."""
    return int(tensor.untyped_storage()._cdata)


def place_of(storage: torch.UntypedStorage) -> int:
    """The same as :func:`storage_id` of a tensor in this storage."""
    return int(storage._cdata)


def grouped_product_without_values(
    operator: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Tensor | None:
    """The result of a grouped matrix product of tensors without values; None: torch (2.13) has a kernel for that.

    There are none for other formats than bf16, which the kernels with values take.
    """
    if operator is not GROUPED_MM.default or args[0].dtype is torch.bfloat16:
        return None
    first, second, *others = args
    if first.shape[-1] != second.shape[-2] or (first.dim() == second.dim() == 3 and len(first) != len(second)):
        raise RuntimeError(f"matrices of {tuple(first.shape)} and {tuple(second.shape)} cannot be multiplied in groups")
    ends = others[0] if others else kwargs.get("offs")
    shape = {
        (2, 2): (0 if ends is None else len(ends), len(first), second.shape[-1]),
        (2, 3): (len(first), second.shape[-1]),
        (3, 2): (first.shape[-2], second.shape[-1]),
        (3, 3): (*first.shape[:-1], second.shape[-1]),
    }[first.dim(), second.dim()]
    return cast(Tensor, first.new_empty(shape, dtype=kwargs.get("out_dtype")))


class FakeMode(FakeTensorMode):  # type: ignore[no-untyped-call]  # torch's __init_subclass__
    """Fakes that can be multiplied in groups in every format."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = MappingProxyType({})) -> Any:
        product = grouped_product_without_values(func, args, kwargs or {})
        return super().__torch_dispatch__(func, types, args, kwargs or {}) if product is None else product


def version_or_none(tensor: Tensor) -> int | None:
    """The version of a tensor; None if it was made in inference mode, where none is kept."""
    return None if tensor.is_inference() else version_of(tensor)


class FakeSpec(NamedTuple):
    """What a fake of a tensor has of it; a fake of a parameter is one."""

    is_parameter: bool
    size: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    requires_grad: bool

    @classmethod
    def of(cls, tensor: Tensor, dtype: torch.dtype, device: torch.device) -> "FakeSpec":
        """Of a fake in this dtype, on this device."""
        # Most parameters are of the very class, which is seen at once.
        is_parameter = type(tensor) is nn.Parameter or isinstance(tensor, nn.Parameter)
        wants_grad = is_parameter and tensor.requires_grad
        return cls(is_parameter, tensor.size(), tensor.stride(), dtype, device, wants_grad)

    def make(self, mode: FakeTensorMode) -> Tensor:
        """The fake. Made directly: a parameter that is made of a fake takes ten times as long."""
        meta = torch.empty_strided(
            self.size, self.stride, dtype=self.dtype, device="meta", requires_grad=self.requires_grad
        )
        fake = FakeTensor(mode, meta, self.device)
        if self.is_parameter:
            # As nn.Parameter marks what is not exactly a tensor.
            fake._is_param = True
        return fake


def has_no_data(tensor: Tensor) -> bool:
    """Whether a tensor has no values: the model is traced, or is on the meta device."""
    return isinstance(tensor, FakeTensor) or tensor.is_meta


def takes_kwargs(module: nn.Module, key: int) -> bool:
    """Whether the forward hook or pre-hook with that key was registered ``with_kwargs=True``."""
    return key in module._forward_hooks_with_kwargs or key in module._forward_pre_hooks_with_kwargs


def unwrapped(tensor: Tensor) -> Tensor:
    """A tensor inside ``torch.func`` transforms (models make masks with ``vmap``) without their wrappers."""
    while _functorch.is_functorch_wrapped_tensor(tensor):
        tensor = _functorch.get_unwrapped(tensor)
    return tensor


def apply_to_tensors(module: nn.Module, function: Callable[[Tensor], Tensor]) -> None:
    """Replace all parameters, gradients and buffers, as ``module.to`` does."""
    module._apply(function)  # type: ignore[no-untyped-call]  # torch


APPLY = "_apply"
"""The method of a module that ``half()``, ``to(...)`` and the like call."""


def apply_of_class(module: nn.Module, function: Callable[[Tensor], Tensor], *args: Any, **kwargs: Any) -> nn.Module:
    """That method of the module's class, whatever is set on the module."""
    converted: nn.Module = type(module)._apply(module, function, *args, **kwargs)  # type: ignore[no-untyped-call]  # torch
    return converted


def forget_flat_weights(module: nn.RNNBase) -> None:
    """Drop the weak references to the weights, which forbid to change those (see ``RNNBase._apply``)."""
    module._flat_weight_refs = []


def remake_flat_weights(module: nn.RNNBase) -> None:
    """Make anew what :func:`forget_flat_weights` dropped."""
    module._init_flat_weights()


def index_sampler_of(loader: Any) -> Any:
    """The sampler that a ``DataLoader`` iterates over, or an iterator of one; None for other objects."""
    return getattr(loader, "_index_sampler", None)


def dataset_of(iterator: Any) -> Any:
    """The dataset that an iterator of a ``DataLoader`` reads; None for other objects."""
    return getattr(iterator, "_dataset", None) if isinstance(iterator, BaseDataLoaderIter) else None


def num_workers_of(iterator: Any) -> int:
    """How many processes load data for an iterator of a ``DataLoader``."""
    return int(iterator._num_workers)


def timeout_of(process_group: dist.ProcessGroup) -> timedelta:
    """After how long a communication of the group is an error."""
    device = torch.device("cuda" if dist.get_backend(process_group) == "nccl" else "cpu")
    timeout: timedelta = process_group._get_backend(device).options._timeout
    return timeout


def nccl_options(timeout: timedelta, *, is_high_priority_stream: bool, max_ctas: int) -> Any:
    """Options of a NCCL group; only where torch has NCCL, and ``max_ctas`` only where that has a configuration."""
    options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=is_high_priority_stream)
    if hasattr(options, "config"):
        options.config.max_ctas = max_ctas
    # new_group() warns of options that have another one than its argument.
    options._timeout = timeout
    return options


def workers_of(batches: object) -> list[BaseProcess]:
    """The processes that load data for an iterator of a ``DataLoader``."""
    return list(getattr(batches, "_workers", ()))


connection_of: Callable[[Store], Store] = methodcaller("clone")
"""Another connection to the store that a store talks to; torch does not declare the method."""


def address_of_store(store: Store) -> tuple[str, int] | None:
    """Where the process listens that hosts a store; None: it is asked otherwise than over a network."""
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    return (store.host, store.port) if isinstance(store, TCPStore) else None


def default_store() -> Store:
    """The store of the default process group."""
    store: Store = dist.distributed_c10d._get_default_store()
    return store


# Of torch with NCCL; without it, torch has a recorder that gloo writes nothing to.
_dump_of_nccl: Callable[[bool, bool], str] | None = getattr(torch._C._distributed_c10d, "_dump_nccl_trace_json", None)


def active_nccl_calls(dump: Callable[[bool, bool], str] | None = _dump_of_nccl) -> str:
    """What NCCL's flight recorder has of communications that are not finished, a line for each; empty: nothing.

    It records where ``TORCH_FR_BUFFER_SIZE`` is above 0.

    Args:
        dump: returns JSON, given whether to include communications, and whether only unfinished ones.
    """
    if dump is None:
        return ""
    entries = json.loads(dump(True, True)).get("entries", [])
    return "".join(
        f"  {entry.get('profiling_name', '?')} {entry.get('collective_seq_id', '?')} of group "
        f"{entry.get('process_group', '?')}: {entry.get('state', '?')}, sizes {entry.get('input_sizes', '?')}\n"
        for entry in entries
    )
