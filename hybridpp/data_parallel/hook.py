"""A hook behind a parameter's gradient that can be turned off for a while."""

from collections.abc import Callable

from torch import Tensor, nn


class GradientHook:
    """Calls ``hook(parameter)`` after autograd has added to its gradient, while it is on, as it is at first.

    Turning it off and on again costs a tenth of a call, which autograd makes for each parameter in each backward pass.

    Args:
        parameter: a leaf that requires a gradient.
        hook: may turn itself off.
    """

    __slots__ = ("_hook", "_hooks", "_id")

    def __init__(self, parameter: nn.Parameter, hook: Callable[[Tensor], None]):
        self._id = parameter.register_post_accumulate_grad_hook(hook).id  # type: ignore[no-untyped-call]  # torch
        # Autograd looks into this dictionary each time, and goes through a copy of what it finds.
        self._hooks = parameter._post_accumulate_grad_hooks
        self._hook = hook

    def on(self) -> None:
        """Call it again, before the hooks that others have registered."""
        others = dict(self._hooks) if self._hooks else None
        self._hooks.clear()
        self._hooks[self._id] = self._hook
        if others:
            self._hooks.update(others)

    def off(self) -> None:
        """Call it no more until it is turned on."""
        self._hooks.pop(self._id, None)
