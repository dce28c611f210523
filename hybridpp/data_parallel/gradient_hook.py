"""A hook on a parameter's gradient accumulation that can be disabled cheaply."""

from collections.abc import Callable

from torch import Tensor, nn

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
