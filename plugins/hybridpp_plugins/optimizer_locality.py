"""Refuse optimizers whose updates depend on more than a rank holds, so that the layout never changes the result."""

from collections.abc import Callable, Iterator, MutableMapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.overrides import TorchFunctionMode

from hybridpp.cluster import get_dist_logger
from hybridpp.code_owner import is_own_module
from hybridpp.config import Precision, ZeroConfig
from hybridpp.errors import ConfigError
from hybridpp.nn.structure import Structure
from hybridpp.nn.torch_private import GLOBAL_STEP_PRE_HOOKS, step_post_hooks_of, step_pre_hooks_of
from hybridpp.nn.watcher import function_name
from hybridpp.optim import (
    FLAT,
    Cut,
    Locality,
    LocalityUnknown,
    OperationsWatch,
    attributes_of,
    compiles_update,
    find_localities,
    optimizer_name,
    single_optimizers,
)
from hybridpp.tensor_parallel import sharding_of
from hybridpp_plugins.layout import Layout

# Attributes of an optimizer that its copies in a trial lack, or have of their own.
_NOT_TRIED = ("param_groups", "state", "step", "_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
# Behind the steps that a trial takes.
_FIRST_LATER = 32
_READING = frozenset(["item", "float", "tolist", "numpy", "array", "renorm", "renorm_"])
_DRAWING = ("randn_like", "rand_like", "normal", "uniform", "bernoulli", "dropout", "exponential")
_SEES = "sees what this rank updates"
_DECIDE = "Decide by optimizer.get_grad_norm() in the script, before the step, or set max_norm of the plugin."
_LOCAL = "an elementwise optimizer (AdamW, HybridAdam, SGD)"


def check_locality(optimizer: Optimizer, names: dict[int, str], layout: Layout, device: torch.device) -> bool:
    """Refuse an optimizer whose updates would depend on the layout. Call it after sharding, before the model is cut.

    Returns whether the update of each element depends on that element only; False if it was not tried.

    Args:
        optimizer: the user's.
        names: of the model's parameters, by ``id``.
        layout: the ranks.
        device: where this one computes.

    Raises:
        ConfigError: its updates depend on unsharded parameters of which ranks hold shards, or on all parameters.
    """
    groups = [group["params"] for group in optimizer.param_groups]
    if layout.grid.pp_size == 1 and not any(sharding_of(parameter) for group in groups for parameter in group):
        return False
    is_elementwise = True
    sizes = f"tp_size={layout.grid.tp_size}, pp_size={layout.grid.pp_size}"
    for one in single_optimizers(optimizer):
        name = optimizer_name(one)
        try:
            found = _localities(one, _shards, layout, device)
        except LocalityUnknown as reason:
            get_dist_logger().warning(
                f"could not check whether {name} gives the same updates for every tp_size and pp_size ({reason}). "
                "Compare the losses of some steps with those of tp_size=1, pp_size=1.",
                ranks=[0],
            )
            is_elementwise = False
            continue
        if Locality.EVERYTHING in found.values():
            raise ConfigError(
                f"{name}'s update of a parameter depends on other parameters, of which a rank holds only a part: got "
                f"{sizes}. Use tp_size=1, pp_size=1, or {_LOCAL}."
            )
        unsharded = [parameter for parameter, kind in found.items() if kind is Locality.PARAMETERS]
        is_elementwise = is_elementwise and not unsharded
        refused = [names[id(parameter)] for parameter in unsharded if sharding_of(parameter)]
        if refused:
            more = f" and of {len(refused) - 1} more" if len(refused) > 1 else ""
            raise ConfigError(
                f"{name}'s update of an element depends on the unsharded parameter, and a rank holds only a shard of "
                f"{refused[0]!r}{more}: got {sizes}. Use tp_size=1, with a larger pp_size if needed, or {_LOCAL}."
            )
    return is_elementwise


def refuse_own_tensors(
    optimizer: Optimizer, layout: Layout, zero: ZeroConfig, precision: Precision, is_sharded: bool
) -> None:
    """Refuse an optimizer that keeps what belongs to its parameters outside of its state, where it cannot be adapted.

    Args:
        optimizer: the user's, before its parameters are exchanged or removed.
        layout: the ranks.
        zero: of the replicas.
        precision: of the model.
        is_sharded: whether ranks hold shards of parameters.

    Raises:
        ConfigError: it would update other parameters than those that train, or with tensors of others.
    """
    divides = {"tp_size": layout.grid.tp_size if is_sharded else 1, "pp_size": layout.grid.pp_size}
    parting = [f"{name}={size}" for name, size in divides.items() if size > 1]
    parting += [f"zero_stage={zero.zero_stage}"] if zero.zero_stage else []
    dividing = [one for one in parting if not one.startswith("pp_size")]
    copies = [f"zero_stage={zero.zero_stage}"] if zero.zero_stage else []
    copies += [f"precision={precision.value!r}"] if precision is not Precision.FP32 else []
    copies += [f"offload_optimizer={zero.offload_optimizer:g}"] if zero.offload_optimizer else []
    others = [*dict.fromkeys((*dividing, *copies))]
    for one in single_optimizers(optimizer):
        parameters = _parameters(one)
        known, shapes = set(map(id, parameters)), set(map(_full_shape, parameters))
        settings = dict(_own_settings(one))
        for holder, value in (*_own_attributes(one), *settings.items()):
            held = list(_held(value))
            if others and any(id(leaf) in known for leaf in held):
                raise ConfigError(
                    f"{optimizer_name(one)} keeps parameters of the model in {holder}, but with "
                    f"{', '.join(others)} it updates copies or parts of them, which are in optimizer.param_groups "
                    "only. Read parameters from self.param_groups in step, and keep what belongs to them in "
                    "self.state[parameter]."
                )
            by_id = any(isinstance(leaf, int) and leaf in known for leaf in held)
            if copies and by_id:
                raise ConfigError(
                    f"{optimizer_name(one)} keeps the id() of parameters of the model in {holder}, but with "
                    f"{', '.join(copies)} it updates copies or parts of them, which have ids of their own. Set an "
                    "attribute on each parameter (parameter.lr_scale = 0.1), which what is updated for it has, too, or "
                    "make parameter groups."
                )
            own = [leaf for leaf in held if isinstance(leaf, Tensor) and id(leaf) not in known]
            is_keyed = by_id or (isinstance(value, dict) and any(isinstance(key, Tensor) for key in value))
            # With pipelines, these go with their parameter, or with the group that has no other.
            goes_along = is_keyed or (len(own) == 1 and holder in settings)
            belong = any(leaf.numel() > 1 for leaf in own) and all(tuple(leaf.shape) in shapes for leaf in own)
            if belong and (dividing if goes_along else parting and len(own) > 1):
                raise ConfigError(
                    f"{optimizer_name(one)} keeps {len(own)} tensors with shapes of the model's parameters in "
                    f"{holder}, but with {', '.join(parting)} a rank updates parts of the parameters, to "
                    "which these do not belong. Keep what belongs to a parameter in self.state[parameter]: that is "
                    "divided as the parameter is, and saved."
                )


def _full_shape(parameter: Tensor) -> tuple[int, ...]:
    """The shape of the complete parameter."""
    sharding = sharding_of(parameter)
    return tuple(parameter.shape) if sharding is None else tuple(sharding.full_shape)


def _own_attributes(optimizer: Optimizer) -> Iterator[tuple[str, Any]]:
    """What it holds besides its groups and state, and where, and the same of optimizers that it wraps."""
    todo, seen = [optimizer], {id(optimizer)}
    while todo:
        for name, value in vars(one := todo.pop()).items():
            if isinstance(value, Optimizer):
                if id(value) not in seen:
                    seen.add(id(value))
                    todo.append(value)
            elif name not in _NOT_TRIED and value is not one.defaults:
                yield f"its attribute {name!r}", value


def _own_settings(optimizer: Optimizer) -> Iterator[tuple[str, Any]]:
    """What its groups hold besides their parameters, and where."""
    for number, group in enumerate(optimizer.param_groups):
        for name, value in group.items():
            if name != "params":
                yield f"param_groups[{number}][{name!r}]", value


def _held(value: Any) -> Iterator[Tensor | int]:
    """Tensors and whole numbers in nested containers."""
    if isinstance(value, Tensor | int):
        yield value
    elif isinstance(value, dict):
        for key, one in value.items():
            yield from _held(key)
            yield from _held(one)
    elif isinstance(value, list | tuple | set):
        for one in value:
            yield from _held(one)


def indivisible_parameters(
    optimizer: Optimizer, names: dict[int, str], zero_stage: int, layout: Layout, device: torch.device
) -> frozenset[str]:
    """The parameters, by name, that replicas cannot divide among themselves, because the optimizer reads them whole.

    Args:
        optimizer: the user's.
        names: of the model's parameters, by ``id``.
        zero_stage: of the plugin.
        layout: the ranks.
        device: where this rank computes.

    Raises:
        ConfigError: the optimizer's update of a parameter depends on other parameters.
    """
    indivisible: list[Tensor] = []
    for one in single_optimizers(optimizer):
        name = optimizer_name(one)
        try:
            found = _localities(one, _anywhere, layout, device)
        except LocalityUnknown as reason:
            get_dist_logger().warning(
                f"could not check what an update of {name} depends on ({reason}), so with zero_stage={zero_stage} "
                "every parameter of it is updated whole, by one replica. Compare the losses of some steps with those "
                "of zero_stage=0.",
                ranks=[0],
            )
            found = dict.fromkeys(_parameters(one), Locality.PARAMETERS)
        if Locality.EVERYTHING in found.values():
            raise ConfigError(
                f"{name}'s update of a parameter depends on other parameters, of which a replica updates only a part: "
                f"got zero_stage={zero_stage}. Use zero_stage=0, or {_LOCAL}."
            )
        indivisible += [parameter for parameter, kind in found.items() if kind is not Locality.ELEMENTS]
    return frozenset(names[id(parameter)] for parameter in indivisible)


class StepWatch:
    """Watches what hooks of an optimizer's step, and its rule in later steps, compute of a rank's part of a model.

    Args:
        optimizer: that the plugin updates the parts with.
        layout: the ranks.
        zero_stage: what replicas divide among themselves.
        is_elementwise: whether each element's update depended on that element only, when it was tried.
    """

    def __init__(self, optimizer: Optimizer, layout: Layout, zero_stage: int, is_elementwise: bool):
        sizes = {"tp_size": layout.grid.tp_size, "pp_size": layout.grid.pp_size}
        parting = [f"{name}={size}" for name, size in sizes.items() if size > 1]
        parting += [f"zero_stage={zero_stage}"] if zero_stage else []
        self._parting = ", ".join(parting)
        self._optimizer, self._is_elementwise = optimizer, is_elementwise
        self._reported: set[str] = set()

    @contextmanager
    def around(self, number: int) -> Iterator[None]:
        """A context for a step of the optimizer, the ``number``-th one since boost."""
        # Hooks of all optimizers are called inside of the step.
        is_due = number >= _FIRST_LATER or bool(GLOBAL_STEP_PRE_HOOKS)
        is_rule_watched = is_due and self._is_elementwise and not compiles_update(self._optimizer)
        with ExitStack() as stack:
            rule = stack.enter_context(OperationsWatch()) if is_rule_watched else None
            stack.enter_context(self._watched_hooks(rule))
            yield
        if rule is not None and rule.mixes:
            name = optimizer_name(self._optimizer)
            if number < _FIRST_LATER:
                self._tell(f"a hook of all optimizers' steps, in {name}'s,", _SEES, _DECIDE)
            else:
                self._tell(f"{name}.step", f"did not before step {number}", f"Use {_LOCAL}.")

    @contextmanager
    def _watched_hooks(self, rule: OperationsWatch | None) -> Iterator[None]:
        """Inside, hooks of the step are watched; what they do is not the rule's."""
        replaced: list[tuple[MutableMapping[int, Any], int, Any]] = []
        for one in {id(one): one for one in (self._optimizer, *single_optimizers(self._optimizer))}.values():
            for hooks in (step_pre_hooks_of(one), step_post_hooks_of(one)):
                for key, hook in hooks.items():
                    replaced.append((hooks, key, hook))
                    hooks[key] = partial(self._run_hook, hook, rule)
        try:
            yield
        finally:
            for hooks, key, hook in replaced:
                if key in hooks:  # a hook may remove itself
                    hooks[key] = hook

    def _run_hook(self, hook: Callable[..., Any], rule: OperationsWatch | None, *given: Any) -> Any:
        mixed_before = rule is not None and rule.mixes
        with OperationsWatch() as operations, _Reads() as reads:
            result = hook(*given)
        if rule is not None:
            rule.mixes = mixed_before
        if operations.mixes or reads.found:
            name = getattr(hook, "__qualname__", type(hook).__qualname__)
            self._tell(f"{name}, a hook of {optimizer_name(self._optimizer)}'s step,", _SEES, _DECIDE)
        return result

    def _tell(self, what: str, why: str, instead: str) -> None:
        if what in self._reported:
            return
        self._reported.add(what)
        get_dist_logger().warning(
            f"{what} takes several elements together (a norm, a sum), reads numbers or draws some, and {why}. With "
            f"{self._parting} that is a part of the model: what it makes of all parameters, or of one that ranks have "
            f"parts of, depends on the layout, and is not the same on all ranks. {instead}",
            ranks=[0],
        )


class _Reads(TorchFunctionMode):
    """Notes whether numbers of tensors are read, drawn, or made of several elements in a tensor as large."""

    found = False

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = function_name(function)
        is_of_floats = bool(args) and isinstance(args[0], Tensor) and args[0].is_floating_point()
        self.found |= is_of_floats and (name in _READING or name.strip("_").endswith(_DRAWING))
        return function(*args, **(kwargs or {}))


def _shards(parameter: Tensor) -> Cut:
    """How the tensor-parallel ranks divide a parameter."""
    sharding = sharding_of(parameter)
    if sharding is None:
        return Cut(tuple(parameter.shape))
    return Cut(sharding.full_shape, sharding.dim, sharding.local_shape[sharding.dim])


def _anywhere(parameter: Tensor) -> Cut:
    """How replicas may divide a parameter."""
    return Cut(tuple(parameter.shape), FLAT if parameter.numel() > 1 else None)


def _parameters(optimizer: Optimizer) -> list[Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _localities(
    optimizer: Optimizer, cut_of: Callable[[Tensor], Cut], layout: Layout, device: torch.device
) -> dict[Tensor, Locality]:
    """As :func:`find_localities`, by parameter; of in-process ranks with equal optimizers, one tries for all."""
    cuts = [[cut_of(parameter) for parameter in group["params"]] for group in optimizer.param_groups]
    found = _found(optimizer, cuts, layout, device)
    return dict(zip(_parameters(optimizer), (kind for of_group in found for kind in of_group), strict=True))


def _found(
    optimizer: Optimizer, cuts: Sequence[Sequence[Cut]], layout: Layout, device: torch.device
) -> list[list[Locality]]:
    results = layout.world.common_results("localities")
    # An optimizer with state is tried with a part of it; of this library's objects a description has the class only.
    if results is None or optimizer.state or is_own_module(type(optimizer).__module__):
        return find_localities(optimizer, cuts, device)
    structure = Structure()
    settings = [{name: value for name, value in group.items() if name != "params"} for group in optimizer.param_groups]
    own = {name: value for name, value in vars(optimizer).items() if name not in _NOT_TRIED}
    kinds = tuple(
        tuple((parameter.dtype, parameter.requires_grad) for parameter in group["params"])
        for group in optimizer.param_groups
    )
    attributes = [[attributes_of(parameter) for parameter in group["params"]] for group in optimizer.param_groups]
    key = structure.of([type(optimizer), settings, own, attributes]), kinds, tuple(map(tuple, cuts)), device
    return results.get(
        key,
        lambda: find_localities(optimizer, cuts, device),
        lambda found: True,
        is_of_run=not structure.is_lasting,
    )
