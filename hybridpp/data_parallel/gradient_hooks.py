"""Hooks on the accumulation of gradients, which move these into their sums, and are called only where they must be."""

import weakref
from collections.abc import Callable, Iterable, Mapping
from functools import partial

from torch import Tensor, nn

from hybridpp.data_parallel.accumulator import GradientAccumulator
from hybridpp.nn.torch_private import accumulated_hooks_of, drop_accumulated_hooks


class GradientHook:
    """Calls ``hook(parameter)`` after autograd has added to the parameter's gradient, while it is enabled.

    It is enabled at first. Disabling and enabling it costs a tenth of a call of the hook, which autograd makes for each
    parameter in each backward pass.

    Args:
        parameter: a leaf that requires a gradient.
        hook: may disable itself.
    """

    __slots__ = ("_hook", "_hooks", "_id", "_parameter", "_was_first")

    def __init__(self, parameter: nn.Parameter, hook: Callable[[Tensor], None]):
        self._parameter = parameter
        self._was_first = accumulated_hooks_of(parameter) is None
        self._id = parameter.register_post_accumulate_grad_hook(hook).id  # type: ignore[no-untyped-call]  # torch
        # Autograd reads this dictionary at every accumulation, and iterates over a copy of it.
        hooks = accumulated_hooks_of(parameter)
        assert hooks is not None, "a hook was registered"
        self._hooks = hooks
        self._hook = hook

    @property
    def is_alone(self) -> bool:
        """Whether it is enabled, and nobody else has registered such a hook."""
        return len(self._hooks) == 1 and self._id in self._hooks

    def enable(self) -> None:
        """Call the hook again, before the hooks that others have registered."""
        others = dict(self._hooks) if self._hooks else None
        self._hooks.clear()
        self._hooks[self._id] = self._hook
        if others:
            self._hooks.update(others)

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
    :meth:`end_backward` takes the gradients of small parameters together.

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
        # Weak, so that the owner is freed with its last reference.
        self._on_gradient = weakref.WeakMethod(on_gradient)
        # Weak: Python's garbage collector does not traverse torch's hooks, so a strong reference to the gradients would
        # keep them and the model alive for ever.
        hook = partial(_call, weakref.ref(self))
        self._hooks = {name: GradientHook(one, partial(hook, name)) for name, one in parameters.items()}
        # Parameters whose hooks are disabled.
        self._disabled: set[str] = set()
        # Parameters to which something outside of autograd has added.
        self._outside: set[str] = set()
        # Small parameters whose hooks the running pass has called; whether no pass has called one twice.
        self._arrived: set[str] = set()
        self._settled: dict[str, bool] = {}
        # Those of them whose hooks are disabled: end_backward takes the gradients, and adds them together.
        self._collected: list[str] = []

    def release(self, name: str) -> None:
        """Let a parameter go."""
        self._disabled.discard(name)
        self._settled[name] = False
        self._hooks[name].remove()

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

    def collect_settled(self) -> None:
        """Disable the hooks of small parameters whose gradients :meth:`end_backward` can take."""
        for name, settled in self._settled.items():
            if settled and name not in self._disabled and self._hooks[name].is_alone:
                self._disable(name)
                self._collected.append(name)

    def end_backward(self) -> None:
        """After a backward pass, before the next: add the gradients that it left in small parameters."""
        for name in self._collected:
            if self._parameters[name].grad is not None:
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
        self._accumulator.move_to_view(name)
        on_gradient = self._on_gradient()
        if on_gradient is None or on_gradient(name):
            return
        if name in self._accumulator.small:
            if name in self._arrived:
                # Reentrant checkpointing runs passes inside a pass. Autograd would add theirs up in half precision.
                self._settled[name] = False
            self._arrived.add(name)
            return
        # Further additions need no hook, unless another hook has replaced the gradient; nor does what is added outside.
        if (is_empty and name in self._outside) or self._parameters[name].grad is self._accumulator.views[name]:
            self._disable(name)

    def _disable(self, name: str) -> None:
        self._disabled.add(name)
        self._hooks[name].disable()


def _call(weak: "weakref.ref[GradientHooks]", name: str, parameter: Tensor) -> None:
    if (hooks := weak()) is not None:
        hooks.call(name)
