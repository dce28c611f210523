"""Find hooks on gradients that are not linear: called for parts of a batch, they make something else of it."""

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from math import frexp
from typing import Any

import torch
from torch import Tensor, nn

from hybridpp.nn.torch_private import accumulated_hooks_of, backward_hooks_of, version_of

# A power of two, so that what is linear rounds alike; large, so that limits are reached.
_FACTOR = 2.0**20
_LARGEST_IN_FP16 = 2.0**14
TOLERANCE = 1e-5
"""Of the largest number that is compared."""
# Of norms: a difference below is the rounding of a format (8 bits with one step for a tensor, or 2 bits of mantissa).
_ALIKE = 0.2


class GradientFactor:
    """By which the gradients are multiplied that something on trial gets; see ``booster.gradient_scale``.

    Attributes:
        was_read: whether the script has read it elsewhere than in what is tried, and may have kept it.
    """

    def __init__(self) -> None:
        self.was_read = False
        self._value, self._depth = 1.0, 0

    def read(self) -> float:
        """It, for the script."""
        self.was_read |= not self._depth
        return self._value

    @contextmanager
    def inside(self, value: float = 1.0) -> Iterator[None]:
        """Inside, something runs that is tried, and gradients are multiplied by ``value``."""
        before, self._value = self._value, value
        self._depth += 1
        try:
            yield
        finally:
            self._value = before
            self._depth -= 1


def factor_for(largest: float, dtypes: Collection[torch.dtype]) -> float:
    """A power of two by which to multiply gradients up to ``largest``, above 0, of these dtypes."""
    if torch.float16 in dtypes:
        return float(2.0 ** (frexp(_LARGEST_IN_FP16 / largest)[1] - 1))
    return _FACTOR


def wave(like: Tensor, step: float) -> Tensor:
    """Numbers from -1 to 1 of which few are near zero, in the shape of a tensor."""
    steps = torch.arange(1, like.numel() + 1, device=like.device, dtype=torch.float32)
    return (steps * step).cos().reshape(like.shape).to(like.dtype)


def differ(one: Tensor, other: Tensor) -> bool:
    """Whether two results differ by more than formats round; those with inf or NaN cannot be told apart."""
    one, other = one.double(), other.double()
    if not (one.isfinite().all() and other.isfinite().all()):
        return False
    return bool((one - other).norm() > _ALIKE * torch.maximum(one.norm(), other.norm()))


def title_of(hook: Callable[..., Any]) -> str:
    """The name of a hook, in errors."""
    return getattr(hook, "__qualname__", type(hook).__name__)


class HookChecks:
    """Calls hooks on the gradients of parameters again, with a multiple of what they were given, and with a sum.

    A linear one makes the same multiple of it, and a sum of sums. Each hook is checked in the first pass in which it
    returns or writes a gradient; later passes pay nothing. Hooks that only look are not called again.

    Args:
        parameters: whose hooks are checked, by name.
        own: keys of this library's hooks.
        divided: the dimensions along which ranks share parameters, by name. What a hook makes of one part of it must
            not depend on the others, in a complete batch too.

    Attributes:
        found: why the passes are refused; empty: they are not.
        factor: by which a hook's gradient is multiplied now; what it adds to gradients must follow.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter], own: Collection[int], divided: Mapping[str, int]):
        self.factor = GradientFactor()
        self._divided, self._in_parts = divided, True
        self._parameters = parameters
        # Keys are unique among all hooks of a process.
        self._known = set(own)
        # Of hooks that have only looked.
        self._looked: set[int] = set()
        self.found = ""

    @contextmanager
    def watching(self, *, in_parts: bool = True) -> Iterator[bool]:
        """A context for passes; gives whether there is a hook to check.

        Args:
            in_parts: whether they are of parts of a batch; else only hooks on what ranks share are checked.
        """
        self._in_parts = in_parts
        placed: list[tuple[Any, int, Any]] = []
        for name in self._parameters if in_parts else self._divided:
            parameter = self._parameters[name]
            kinds = (backward_hooks_of(parameter), self._of_gradient), (accumulated_hooks_of(parameter), self._of_sum)
            for held, check in kinds:
                hooks: Any = held or {}
                for key in [key for key in hooks if key not in self._known]:
                    placed.append((hooks, key, hooks[key]))
                    hooks[key] = partial(check, key, name, hooks[key])
        if not placed:
            yield False
            return
        try:
            yield True
        finally:
            for held, key, hook in placed:
                if key in held:  # else it was removed
                    held[key] = hook

    def _of_gradient(self, key: int, name: str, hook: Callable[[Tensor], Tensor | None], gradient: Tensor) -> Any:
        """Instead of a hook that is given a gradient, and may return another."""
        before, version = gradient.detach().clone(), version_of(gradient)
        with self.factor.inside():
            result = hook(gradient)
        made = gradient if result is None else result
        if result is None and self._only_looks(key, before, gradient, version):
            return None

        def again(multiple: Tensor) -> Tensor | None:
            other = hook(multiple)
            return multiple if other is None else other

        self._compare(key, name, hook, before, made, again)
        return result

    def _of_sum(self, key: int, name: str, hook: Callable[[Tensor], None], parameter: Tensor) -> None:
        """Instead of a hook that is given a parameter with its gradient."""
        assert parameter.grad is not None, "autograd has added to it"
        given = parameter.grad
        before, version = given.detach().clone(), version_of(given)
        with self.factor.inside():
            hook(parameter)
        made = parameter.grad
        if made is None or (made is given and self._only_looks(key, before, given, version)):
            return

        def again(multiple: Tensor) -> Tensor | None:
            parameter.grad = multiple
            hook(parameter)
            return parameter.grad

        try:
            self._compare(key, name, hook, before, made, again)
        finally:
            parameter.grad = made

    def _only_looks(self, key: int, before: Tensor, gradient: Tensor, version: int) -> bool:
        """Whether a hook has not written to a gradient; the host waits for the device once for each hook."""
        if version_of(gradient) != version:
            return False
        is_new = key not in self._looked
        self._looked.add(key)
        return not is_new or torch.equal(before, gradient)  # not through gradient.data either

    def _compare(
        self,
        key: int,
        name: str,
        hook: Callable[..., Any],
        before: Tensor,
        made: Tensor,
        again: Callable[[Tensor], Tensor | None],
    ) -> None:
        """Compare what a hook has made of a gradient with what it makes of a multiple. Waits for the device."""
        if key in self._known or before.layout is not torch.strided:
            return
        largest = float(before.abs().max())
        if not 0 < largest < float("inf"):
            return
        factor = factor_for(largest, {before.dtype})
        self._known.add(key)
        if name in self._divided and self._couples(before, self._divided[name], largest, again):
            self.found = (
                f"the hook {title_of(hook)!r} on the gradient of {name} is called for this rank's shard of it, and "
                "makes something of all elements together (their norm, for example), which needs the other ranks' "
                "shards. Change gradients between backward and step (optimizer.clip_grad_by_norm), use tp_size=1, or a "
                "tensor_parallel_plan that leaves the layer as it is."
            )
            return
        if not self._in_parts:
            return
        made = made.detach().clone()
        expected = made * factor
        other: Tensor | None = None
        # It may depend on what it has done already.
        with suppress(Exception), self.factor.inside(factor):
            other = again(before * factor)
        if other is None or not expected.isfinite().all():
            return
        is_multiple = bool((other.detach() - expected).abs().max() <= TOLERANCE * expected.abs().max())
        if not is_multiple or not self._adds_up(before, made, largest * wave(before, 1.7), again):
            self.found = (
                f"the hook {title_of(hook)!r} on the gradient of {name} is called "
                "for a part of the batch, and is not linear (it clips, normalises, adds or draws): its result depends "
                "on the numbers of micro-batches and replicas. Change gradients between backward and step, use "
                "num_microbatches=1 and one replica, or, for a term that is added, multiply it by "
                "booster.gradient_scale."
            )

    def _couples(self, before: Tensor, dim: int, largest: float, again: Callable[[Tensor], Tensor | None]) -> bool:
        """Whether what a hook makes of the first half of a shard depends on the second."""
        base = largest * factor_for(8 * largest, {before.dtype}) * wave(before, 1.0)
        half = before.size(dim) // 2
        if not half:
            return False
        other = base.clone()
        rest = other.narrow(dim, half, before.size(dim) - half)
        rest.copy_(8 * rest.abs())
        made: list[Tensor] = []
        with suppress(Exception):  # then it cannot be told
            for one in (base, other, base):
                with self.factor.inside():
                    result = again(one.clone())
                if result is not None:
                    made.append(result.detach().narrow(dim, 0, half).clone())
        return len(made) == 3 and differ(made[0], made[1]) and not differ(made[0], made[2])

    def _adds_up(self, before: Tensor, made: Tensor, other: Tensor, again: Callable[[Tensor], Tensor | None]) -> bool:
        """Whether what a hook makes of two gradients is, together, what it makes of their sum."""
        with suppress(Exception):  # then it cannot be told
            total = before + other
            with self.factor.inside():
                alone = again(other)
            alone = None if alone is None else alone.detach().clone()
            with self.factor.inside(2.0):  # as of both parts
                together = again(total)
            return alone is None or together is None or not differ(made + alone, together.detach())
        return True
