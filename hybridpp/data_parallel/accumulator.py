"""Accumulation of gradients in flat buckets, by hooks that are called only where they must be."""

import weakref
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn

from hybridpp.data_parallel.bucket import Bucket, GradientSharding
from hybridpp.data_parallel.layout import ShardLayout
from hybridpp.errors import ConfigError
from hybridpp.nn.torch_private import (
    accumulated_hooks_of,
    backward_hooks_of,
    drop_accumulated_hooks,
    foreach_add_,
    foreach_copy_,
    has_no_data,
    make_wrapper_subclass,
    pytree,
    register_hooks_again,
    schema_of,
    version_of,
)

# Elements: the norms and biases of large models. A gradient that waits takes memory, at most as much as its parameter.
_MAX_SMALL = 2**16


class GradientAccumulator:
    """The sums of a rank's gradients over micro-batches and calls, in flat buckets.

    A sum starts as a copy of its first summand. Before that, the bucket may hold old values and ``parameter.grad`` is
    None, so that autograd creates a tensor there. After it, ``parameter.grad`` is a view into the bucket, to which
    autograd adds in place, if ``exposes_grad`` and the dtypes agree.

    Args:
        parameters: the trainable parameters, by name, in the order of the forward.
        layout: the buckets.
        exposes_grad: whether ``parameter.grad`` shows the sums.
        sharding: which sums are kept.

    Attributes:
        buckets: in the order in which a backward pass completes them.
        bucket_of: each parameter's bucket, by name.
        views: each parameter's view into its bucket, which may hold old values; see :meth:`zero_stale`.
        small: parameters whose gradients are added together.
        apart: parameters whose ``grad`` is that of each pass alone while passes run, for hooks of the script.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        layout: ShardLayout,
        exposes_grad: bool,
        sharding: GradientSharding = GradientSharding.NONE,
    ):
        self.buckets = [Bucket(bucket, parameters, layout.index, sharding) for bucket in layout.buckets]
        self.bucket_of = {name: bucket for bucket in self.buckets for name in bucket.views}
        self.views: dict[str, Tensor] = {name: self.bucket_of[name].views[name] for name in parameters}
        self._parameters = dict(parameters)
        self._exposed = {
            name: parameter
            for name, parameter in parameters.items()
            if exposes_grad and parameter.dtype == self.views[name].dtype
        }
        self._small = SmallGradients({name: self.views[name] for name in parameters if name not in self._exposed})
        self.small: Collection[str] = self._small.views.keys()
        self.apart: Collection[str] = ()
        self._is_hidden = False
        # Parameters whose view holds old values.
        self._stale: set[str] = set()
        # Of these, those of which it is to be found whether the old values are zeros, and those of which they are.
        self._asked: set[str] = set()
        self._found_zeros: set[str] = set()
        # Those of zeros that are None, as nothing was added to them.
        self._unreached: set[str] = set()
        # The version of each bucket when it was last all zero; writes through ``.data`` do not change the version.
        self._zero_versions = {bucket: -1 if bucket.frees else version_of(bucket.flat) for bucket in self.buckets}

    def reset(self, set_to_none: bool = True) -> None:
        """Set all sums to zero; exposed ``parameter.grad`` become None, or zeros unless ``set_to_none``."""
        self._small.waiting.clear()
        self._is_hidden = False
        for bucket in self.buckets:
            if bucket.frees or bucket.aside is not None:
                bucket.clear()
            if self._holds_numbers(bucket):
                self._stale.update(bucket.views)
        if not set_to_none:
            self.zero_stale()
            return
        for parameter in self._exposed.values():
            parameter.grad = None

    def begin(self) -> None:
        """Prepare for backward passes."""
        is_hidden, self._is_hidden = self._is_hidden, False
        self._unreached.clear()
        for name, parameter in self._exposed.items():
            view, gradient = self.views[name], parameter.grad
            if gradient is view:
                if name in self.apart:
                    parameter.grad = None
                continue
            if is_hidden:
                parameter.grad = None if name in self._stale or name in self.apart else view
                continue
            # None, set by the script (module.zero_grad()) or never set, counts as zero.
            if self._holds_numbers(self.bucket_of[name]):
                self._stale.add(name)
            parameter.grad = None if name in self._stale or name in self.apart else view

    def join(self) -> None:
        """After passes: show the sums of what was :attr:`apart`."""
        for name in self.apart:
            if name in self._exposed and name not in self._stale:
                self._exposed[name].grad = self.views[name]
        self.apart = ()

    def dropped(self) -> set[str]:
        """Parameters whose exposed sums the script has set to None (``module.zero_grad()``)."""
        if self._is_hidden:
            return set()
        return {name for name, parameter in self._exposed.items() if parameter.grad is None and name not in self._stale}

    def drop(self, names: Iterable[str]) -> None:
        """Let exposed sums of zeros, to which nothing was added, be None."""
        for name in names:
            parameter = self._exposed.get(name)
            if parameter is not None and parameter.grad is self.views[name]:
                parameter.grad = None
                self._unreached.add(name)

    def ask_for_zeros(self, names: set[str]) -> None:
        """Find out which sums of these parameters, which are shown, are zeros before they are dropped.

        A write through ``.data`` changes no version. It is asked of those only that the next passes do not reach, which
        waits for the device.
        """
        self._asked = names & self._exposed.keys()

    def take_zeros(self) -> set[str]:
        """What was found since :meth:`ask_for_zeros`; nothing is asked any more."""
        found, self._found_zeros = self._found_zeros, set()
        self._asked = set()
        return found

    def _holds_numbers(self, bucket: Bucket) -> bool:
        return version_of(bucket.flat) != self._zero_versions[bucket]

    def _ready(self, bucket: Bucket) -> None:
        """Let a bucket have memory that no earlier reduction uses."""
        if bucket.work is not None and bucket.each_pass:
            bucket.wait()
        if not bucket.is_open:
            bucket.open()
            self._zero_versions[bucket] = -1

    def add(self, name: str, gradient: Tensor) -> None:
        """Add to the sum of the parameter ``name``: at the latest when the sum is read, and then with other small ones.

        Nobody may write to ``gradient`` afterwards.
        """
        if name in self._small.views:
            if name in self._small.waiting:
                self.add_collected()
            self._small.waiting[name] = gradient
            return
        if name in self._exposed and name not in self.apart:
            # What autograd has left there while the hook was disabled would be replaced.
            self.move_to_view(name)
        self._ready(self.bucket_of[name])
        if name not in self._stale:
            self.views[name].add_(gradient)
            return
        self._stale.discard(name)
        self.views[name].copy_(gradient)
        if name in self._exposed and name not in self.apart:
            self._exposed[name].grad = self.views[name]

    def add_collected(self, buckets: Collection[Bucket] | None = None) -> None:
        """Add the gradients of small parameters that were given to :meth:`add`, in ``buckets`` (None: in all)."""
        if self._small.waiting:
            taken = self._small.take(None if buckets is None else [name for one in buckets for name in one.views])
            for bucket in {self.bucket_of[name] for name in taken}:
                self._ready(bucket)
            self._small.add(taken, self._stale)
            self._stale.difference_update(taken)

    def zero_stale(self, buckets: Collection[Bucket] | None = None) -> dict[str, Tensor]:
        """Complete the sums in ``buckets``: zeros instead of old values; returns all sums, by name.

        Without ``buckets``: in all that are not reduced after each pass.
        """
        self.add_collected(buckets)
        if self._stale:
            for bucket in [one for one in self.buckets if not one.each_pass] if buckets is None else buckets:
                self._zero_stale_in(bucket)
        return self.views

    def _zero_stale_in(self, bucket: Bucket) -> None:
        stale = self._stale.intersection(bucket.views)
        if asked := stale & self._asked:
            self._found_zeros |= {name for name in asked if bucket.is_open and not bucket.views[name].any()}
            self._asked -= asked
        if stale:
            self._ready(bucket)
        if len(stale) == len(bucket.views):
            if self._holds_numbers(bucket):
                bucket.flat.zero_()
                self._zero_versions[bucket] = version_of(bucket.flat)
        else:
            for name in stale:
                bucket.views[name].zero_()
        self._stale -= stale
        for name in stale & self._exposed.keys():
            # The script may have set another tensor.
            if self._exposed[name].grad is None:
                self._exposed[name].grad = bucket.views[name]

    @property
    def version(self) -> tuple[int, ...]:
        """Changes with every change of the sums, but not through ``.data``."""
        return tuple(version_of(bucket.flat) for bucket in self.buckets)

    def flats(self, *, own: bool) -> list[Tensor]:
        """All sums as flat tensors; ``own``: this replica's segments of them, after a reduction."""
        if own:
            return [bucket.complete() for bucket in self.buckets]
        self.zero_stale()
        return [bucket.flat for bucket in self.buckets]

    def sync_from_grad(self) -> dict[str, bool]:
        """Copy each ``parameter.grad`` that the script replaced into the sums; by name, whether it is a tensor."""
        self.zero_stale()
        changed = {}
        for name, parameter in self._exposed.items():
            view, gradient = self.views[name], parameter.grad
            if gradient is view or (gradient is None and name in self._unreached):
                continue
            changed[name] = gradient is not None
            if gradient is None:
                view.zero_()
            else:
                view.copy_(gradient)
            parameter.grad = view
        return changed

    def move_to_view(self, name: str) -> None:
        """Move a gradient into its view, if autograd created another tensor for it."""
        parameter, view = self._parameters[name], self.views[name]
        gradient = parameter.grad
        if gradient is None or gradient is view:
            return
        gradient = gradient.detach()  # with create_graph it has a graph
        if name in self._exposed and name not in self.apart:
            self._ready(self.bucket_of[name])
            view.copy_(gradient)
            self._stale.discard(name)
            parameter.grad = view
        else:
            self.add(name, gradient)
            parameter.grad = None


class _Use:
    """Whether a step has used the gradients, and which the script has set to zeros since then, by name."""

    def __init__(self) -> None:
        self.is_used = False
        self.zeros: set[str] = set()


class HiddenGradient(Tensor):
    """A gradient of the right shape, dtype and device without memory: whoever reads or writes values is refused.

    After the step that has used it, it may be set to zeros, as ``module.zero_grad(set_to_none=False)`` does.
    """

    _parameter: str
    _use: _Use

    @staticmethod
    def __new__(cls, parameter: str, like: Tensor, use: _Use, **converted: Any) -> "HiddenGradient":
        """The gradient of ``parameter``, which is ``like`` this tensor, but for what is ``converted``."""
        kind = {"dtype": like.dtype, "device": like.device, **converted}
        made: Any = make_wrapper_subclass(cls, like.shape, strides=like.stride(), **kind)
        made._parameter, made._use = parameter, use
        return cast(HiddenGradient, made)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]  # of torch
        """Note zeros after the step that has used the gradient; refuse anything else."""
        found = [one for one in pytree.tree_leaves((args, kwargs)) if isinstance(one, HiddenGradient)]
        name, use = found[0]._parameter, found[0]._use
        if not use.is_used:
            raise ConfigError(
                f"{name}.grad was read or written between the backward pass and optimizer.step(): in bf16, "
                "in fp16 and with ZeRO the gradients are not there. Call optimizer.clip_grad_by_norm(max_norm) instead "
                "of torch.nn.utils.clip_grad_norm_, or set HybridParallelPlugin(max_norm=...); "
                "optimizer.clip_grad_by_value clips values, and optimizer.gradients() returns all gradients. "
                "parameter.grad = None, model.zero_grad() and optimizer.zero_grad() drop them."
            )
        operation = schema_of(func).name.rpartition("::")[2]
        if operation in ("detach", "alias", "_to_copy"):  # for ``.data``, and where a script converts the model
            given = {key: value for key, value in (kwargs or {}).items() if key in ("dtype", "device") and value}
            return cls(name, found[0], use, **given)
        values = args[1] if len(args) > 1 else 0
        is_zero = not values.any() if isinstance(values, Tensor) else values == 0
        if operation.strip("_").removeprefix("foreach_") not in _ZEROING or not operation.endswith("_") or not is_zero:
            raise ConfigError(
                f"{name}.grad was read or written after optimizer.step() had used it: in bf16, in fp16 and with ZeRO "
                "the gradients are not there. optimizer.gradients() returns those of the step, clipped, until the next "
                "backward pass, and optimizer.get_grad_norm() their norm. A backward pass of the script is "
                "booster.backward(loss, optimizer)."
            )
        use.zeros.update(one._parameter for one in found)
        return args[0] if isinstance(args[0], Tensor) else None  # lists are written to, and not returned

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]  # of torch
        return f"HiddenGradient({self._parameter!r}, shape={tuple(self.shape)}, dtype={self.dtype})"


# Operators that make zeros in place, with 0 or no number.
_ZEROING = frozenset(("zero", "fill", "mul", "copy"))


class HiddenGradients:
    """Sets ``grad`` from the backward pass on, until gradients are dropped, where these are kept elsewhere.

    Args:
        parameters: by name.
        is_divided: whether replicas update different ones, or parts of them.

    Attributes:
        is_shown: whether it is set.
    """

    def __init__(self, parameters: Mapping[str, Tensor], is_divided: bool):
        self._parameters, self._is_divided = parameters, is_divided
        self._tensors = [(name, parameter) for name, parameter in parameters.items()]
        self._made: dict[int, HiddenGradient] = {}
        self._use = _Use()
        self.is_shown = False
        self._shown: Collection[str] = ()

    def add(self, updated: Mapping[str, Tensor]) -> None:
        """Set it also on what is updated for the parameters, by name: the tensors of the optimizer's groups."""
        self._tensors += [(name, one) for name, one in updated.items() if one is not self._parameters.get(name)]

    def show(self, reached: Collection[str]) -> None:
        """Set it for these parameters; others have no gradient."""
        self._shown, self.is_shown = set(reached), True
        self._use.is_used = False
        self._use.zeros.clear()
        for name, tensor in self._tensors:
            if name in self._shown and tensor.grad is None:
                made = self._made.get(id(tensor))
                if made is None or made.dtype is not tensor.dtype or made.shape != tensor.shape:
                    made = self._made[id(tensor)] = HiddenGradient(name, tensor, self._use)
                tensor.grad = made

    def use(self) -> None:
        """A step has used the gradients: they may be set to zeros."""
        if self.is_shown:
            self._use.is_used = True

    @property
    def are_used(self) -> bool:
        """Whether it is set for gradients that a step has used, or that are zeros."""
        return self.is_shown and self._use.is_used

    def show_zeros(self, names: Collection[str]) -> None:
        """Set it for parameters whose gradients are zeros."""
        self.show(names)
        self._use.is_used = True

    def zeros(self) -> set[str]:
        """The parameters whose gradients the script has set to zeros since a step has used them."""
        return {name for name in self._use.zeros if isinstance(self._parameters[name].grad, HiddenGradient)}

    def cleared(self) -> set[str]:
        """The parameters for which the script has set it to None since :meth:`show`.

        Raises:
            ConfigError: it has set another tensor, or that of a part of a parameter to None.
        """
        found: set[str] = set()
        for name, tensor in self._tensors if self.is_shown else ():
            gradient = tensor.grad
            if gradient is self._made.get(id(tensor)):
                continue
            if gradient is not None and self._use.is_used:
                continue  # what it is, is looked at before the next pass
            if gradient is not None:
                raise ConfigError(
                    f"{name}.grad was set between the backward pass and optimizer.step(): in bf16, in fp16 and with "
                    "ZeRO the gradients are not there, so it would not be used. Call optimizer.clip_grad_by_norm or "
                    "clip_grad_by_value, or change the loss."
                )
            if name not in self._shown:
                continue
            if self._use.is_used and tensor is not self._parameters[name]:
                continue
            if name not in found and self._is_divided and tensor is not self._parameters[name]:
                raise ConfigError(
                    f"the gradient of {name} was set to None in optimizer.param_groups: with ZeRO these are the parts "
                    f"of one replica. Set that of the model's parameter to None, on all ranks: "
                    f"model.get_parameter({name!r}).grad = None."
                )
            found.add(name)
        self._shown = set(self._shown) - found
        return found

    def hide(self) -> None:
        """Take it off."""
        if self.is_shown:
            self.is_shown = False
            for _, tensor in self._tensors:
                tensor.grad = None


class SmallGradients:
    """Gradients that wait to be added to their sums, in a few kernels instead of one for each.

    Attributes:
        views: the sums, by parameter name; of those that are given, small ones.
        waiting: the gradients that wait, by parameter name.
    """

    def __init__(self, views: Mapping[str, Tensor]):
        self.views = {name: view for name, view in views.items() if view.numel() <= _MAX_SMALL}
        self.waiting: dict[str, Tensor] = {}
        # Where gradients are converted to the sums' format.
        self._converted: dict[str, Tensor] = {}

    def take(self, names: Collection[str] | None) -> dict[str, Tensor]:
        """What waits of the parameters ``names`` (None: of all), which waits no more."""
        taken = [name for name in (self.waiting if names is None else names) if name in self.waiting]
        return {name: self.waiting.pop(name) for name in taken}

    def add(self, gradients: Mapping[str, Tensor], overwritten: Collection[str]) -> None:
        """Add to the sums, by name; where a sum holds old values (``overwritten``), replace them."""
        groups: dict[tuple[bool, torch.dtype], list[str]] = defaultdict(list)
        for name, gradient in gradients.items():
            groups[name in overwritten, gradient.dtype].append(name)
        for (is_first, _), names in groups.items():
            views, parts = [self.views[name] for name in names], [gradients[name] for name in names]
            if is_first:
                foreach_copy_(views, parts)
            else:
                foreach_add_(views, self._as_sums(names, parts))

    def _as_sums(self, names: list[str], parts: list[Tensor]) -> list[Tensor]:
        """The gradients in the format of the sums, where torch adds lists of one format only in one kernel."""
        first = self.views[names[0]]
        if first.dtype is parts[0].dtype or first.device.type == "cpu":
            return parts
        for name in names:
            if name not in self._converted:
                self._converted[name] = torch.empty_like(self.views[name])
        converted = [self._converted[name] for name in names]
        foreach_copy_(converted, parts)
        return converted


class GradientHook:
    """Calls ``hook(parameter)`` after autograd has added to the parameter's gradient, while it is enabled.

    It is enabled at first, and ``hook`` may disable itself. Disabling and enabling it costs a tenth of a call of the
    hook, which autograd makes for each parameter in each backward pass.
    """

    def __init__(self, parameter: nn.Parameter, hook: Callable[[Tensor], None]):
        self._parameter, self._was_first = parameter, accumulated_hooks_of(parameter) is None
        self._id = parameter.register_post_accumulate_grad_hook(hook).id  # type: ignore[no-untyped-call]  # torch
        # Autograd reads this dictionary at every accumulation, and iterates over a copy of it.
        hooks = accumulated_hooks_of(parameter)
        assert hooks is not None, "a hook was registered"
        self._hooks, self._hook = hooks, hook

    @property
    def key(self) -> int:
        """Under which torch holds it."""
        key: int = self._id
        return key

    @property
    def has_others(self) -> bool:
        """Whether somebody else has registered such a hook."""
        return len(self._hooks) > (self._id in self._hooks)

    @property
    def is_alone(self) -> bool:
        """Whether it is enabled, and nobody else has registered such a hook."""
        return len(self._hooks) == 1 and self._id in self._hooks

    def enable(self) -> None:
        """Call the hook again, after the hooks that others have registered, which may change the gradient."""
        self._hooks.pop(self._id, None)
        self._hooks[self._id] = self._hook

    def disable(self) -> None:
        """Do not call the hook until :meth:`enable`."""
        self._hooks.pop(self._id, None)

    def remove(self) -> None:
        """Take it off; where there was no dictionary of hooks before it, there is none after."""
        self.disable()
        if self._was_first and not self._hooks:
            drop_accumulated_hooks(self._parameter)


class GradientHooks:
    """Moves what autograd adds to parameters' gradients into an accumulator, with as few calls of hooks as possible.

    A hook costs more than adding to a small gradient. So it is off while autograd adds to the sum in place, and where
    :meth:`end_backward` looks for what a pass has left: gradients of small parameters, which it takes together, and
    those of parameters to which something outside of autograd adds, to which another pass may add by autograd.

    Args:
        accumulator: the sums.
        parameters: the trainable parameters, by name.
        on_gradient: called with a name at each hook; returns whether this pass completes the gradient, so that the hook
            must stay.

    Attributes:
        reached: parameters that a backward pass has reached; the caller clears it.
    """

    def __init__(
        self,
        accumulator: GradientAccumulator,
        parameters: Mapping[str, nn.Parameter],
        on_gradient: Callable[[str], bool],
    ):
        self.reached: set[str] = set()
        self._accumulator = accumulator
        self._parameters = parameters
        # Both weak: Python's garbage collector does not traverse torch's hooks, so a strong reference to the gradients
        # would keep them and the model alive for ever.
        self._on_gradient = weakref.WeakMethod(on_gradient)
        hook = partial(_call, weakref.ref(self))
        self._hooks = {name: GradientHook(one, partial(hook, name)) for name, one in parameters.items()}
        self._addresses = [-1] * len(parameters)
        # Parameters on which the script has hooks, too.
        self._with_others: Collection[str] = ()
        # Parameters whose hooks are disabled.
        self._disabled: set[str] = set()
        # Parameters to which something outside of autograd has added.
        self._outside: set[str] = set()
        # Small parameters whose hooks the running pass has called; whether no pass has called one twice.
        self._arrived: set[str] = set()
        self._settled: dict[str, bool] = {}
        # Parameters whose hooks are disabled, and whose gradients end_backward takes.
        self._collected: list[str] = []

    def release(self, name: str) -> None:
        """Let a parameter go."""
        self._disabled.discard(name)
        self._collected = [one for one in self._collected if one != name]
        self._settled[name] = False
        self._hooks[name].remove()

    def keep(self) -> None:
        """Register hooks again where a parameter has other memory: it may have been swapped (``swap_tensors``)."""
        addresses = [0 if has_no_data(one) else one.data_ptr() for one in self._parameters.values()]
        if addresses != self._addresses:
            for before, now, parameter in zip(self._addresses, addresses, self._parameters.values(), strict=True):
                if before != now:
                    register_hooks_again(parameter)
            self._addresses = addresses

    def mark_reached(self, names: Iterable[str]) -> None:
        """Note that something outside of autograd adds to these gradients."""
        names = tuple(names)
        self.reached.update(names)
        self._outside.update(names)

    def enable(self, names: Iterable[str] | None = None) -> None:
        """Enable the hooks of these parameters; None: of all."""
        enabled = self._disabled.intersection(self._parameters if names is None else names)
        for name in enabled:
            self._hooks[name].enable()
            # A backward pass with create_graph replaces the view by a tensor that holds the sum.
            self._accumulator.move_to_view(name)
        self._disabled -= enabled
        self._collected = [name for name in self._collected if name not in enabled]
        self._arrived -= enabled

    @property
    def keys(self) -> list[int]:
        """Under which torch holds the hooks."""
        return [hook.key for hook in self._hooks.values()]

    @property
    def has_others(self) -> bool:
        """Whether the script has hooks on gradients of parameters, of either kind."""
        return any(map(backward_hooks_of, self._parameters.values())) or any(
            hook.has_others for hook in self._hooks.values()
        )

    def find_others(self) -> Collection[str]:
        """The parameters on which the script has registered hooks, too; theirs are called before these."""
        self._with_others = {name for name, hook in self._hooks.items() if hook.has_others}
        for name in self._with_others:
            self._hooks[name].enable()
        return self._with_others

    def collect_settled(self) -> None:
        """Disable the hooks of small parameters whose gradients :meth:`end_backward` can take."""
        for name, settled in self._settled.items():
            if settled and name not in self._disabled and self._hooks[name].is_alone:
                self._collect(name)

    def end_backward(self) -> None:
        """After a backward pass, before the next: add the gradients that it left in parameters."""
        views = self._accumulator.views
        for name in self._collected:
            gradient = self._parameters[name].grad
            if gradient is not None and gradient is not views[name]:
                self._accumulator.move_to_view(name)
                self.reached.add(name)
        self._accumulator.add_collected()
        if self._arrived:
            self._settled.update((name, self._settled.get(name, True)) for name in self._arrived)
            self._arrived.clear()
            self.collect_settled()

    def call(self, name: str) -> None:
        """Autograd has added to a gradient, or has been told that there is nothing to add."""
        is_empty = self._parameters[name].grad is None
        was_reached = name in self.reached
        self._accumulator.move_to_view(name)
        on_gradient = self._on_gradient()
        if on_gradient is None:
            return
        is_last = on_gradient(name)
        if name in self._with_others and is_empty and not was_reached:
            self.reached.discard(name)  # a hook of the script has dropped it
        if is_last or name in self._with_others:
            return
        if name in self._accumulator.small:
            if name in self._arrived:
                # Reentrant checkpointing runs passes inside a pass. Autograd would add theirs up in half precision.
                self._settled[name] = False
            self._arrived.add(name)
            return
        # Further additions need no hook, unless another hook has replaced the gradient.
        if self._parameters[name].grad is self._accumulator.views[name]:
            self._disable(name)
        elif is_empty and name in self._outside:
            # What is added outside needs none. But a later pass may reach other uses of the parameter.
            self._collect(name)

    def _collect(self, name: str) -> None:
        """Disable the hook of a parameter whose gradients :meth:`end_backward` takes."""
        self._disable(name)
        self._collected.append(name)

    def _disable(self, name: str) -> None:
        self._disabled.add(name)
        self._hooks[name].disable()


def _call(weak: "weakref.ref[GradientHooks]", name: str, parameter: Tensor) -> None:
    if (hooks := weak()) is not None:
        hooks.call(name)
