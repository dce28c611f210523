"""Find hooks on the gradients of activations that make something of all samples together, as their norm is."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from hybridpp.cluster import preserved_random_state
from hybridpp.code_owner import is_library_module
from hybridpp.data_parallel.hook_checks import TOLERANCE, GradientFactor, factor_for, title_of
from hybridpp.data_parallel.part_trials import GradientList, PartTrial
from hybridpp.data_parallel.sources import Sources
from hybridpp.nn import walk
from hybridpp.nn.snapshot import Replacements
from hybridpp.nn.torch_private import gradient_hooks_of_module, version_of
from hybridpp.nn.watcher import WatchingMode, with_lost_weight

_Gradients = Sequence[Tensor | None]


class ActivationHooks:
    """Calls hooks that change gradients of activations once more, with large gradients of which a half is zero.

    The gradients of a sample's activations are the same in any layout: so a hook may clip each of their elements, or
    each sample for itself. If what it makes of some samples depends on others (the norm of the batch), its result
    depends on how many there are in a micro-batch. A hook on a scalar must be linear, as one on a parameter. Hooks that
    only look are called once; what fails or differs in a second call cannot be told, and is left alone.

    Args:
        model: the user's, whose modules may have backward hooks.
        factor: by which gradients are multiplied meanwhile.

    Attributes:
        found: why the pass is refused; empty: it is not.
    """

    def __init__(self, model: nn.Module, factor: GradientFactor):
        self._model, self._factor = model, factor
        self._num_samples: int | None = None
        self.found = ""

    def keys(self) -> frozenset[int]:
        """The numbers of the script's hooks on gradients of modules."""
        return frozenset(key for _, _, key, _ in self._of_modules())

    def _of_modules(self) -> Iterator[tuple[str, dict[int, Callable[..., Any]], int, Callable[..., Any]]]:
        """The script's hooks on gradients of modules: the module's name, where the hook is held, its number, and it."""
        for name, module in walk.named_modules(self._model):
            for held in gradient_hooks_of_module(module):
                for key, hook in list(held.items()):
                    if _is_of_script(hook):
                        yield name, held, key, hook

    @contextmanager
    def watching(self, num_samples: int | None) -> Iterator[None]:
        """A context for the forward of a part of a batch; ``num_samples``: in it, if that is known."""
        self._num_samples = num_samples
        replaced = Replacements()
        for name, held, key, hook in self._of_modules():
            replaced.put(held, key, partial(self._of_module, hook, f"on the gradients of {name or 'the model'}"))
        try:
            with _RegisteredHooks(self._of_tensor, Sources(self._model, num_samples)):
                yield
        finally:
            replaced.restore(keep_newer=True)

    def _of_tensor(self, hook: Callable[[Tensor], Tensor | None], weight: str, gradient: Tensor) -> Tensor | None:
        """Instead of a hook that is given the gradient of an activation, and may return another.

        Args:
            hook: of the script.
            weight: the name of one that the tensor is made of, if it is made of weights alone.
            gradient: of the tensor.
        """

        def call(given: _Gradients) -> _Gradients:
            (one,) = given
            assert one is not None, "it is a gradient"
            result = hook(one)
            return [one if result is None else result]

        before, version = gradient.detach().clone(), version_of(gradient)
        with self._factor.inside():
            result = hook(gradient)
        if result is None and version_of(gradient) == version:
            return None
        if weight:
            self._try_of_weights(hook, weight, call, [before])
        else:
            self._try(hook, f"on the gradient of an activation of shape {tuple(gradient.shape)}", call, [before])
        return result

    def _of_module(
        self, hook: Callable[..., Any], where: str, module: nn.Module, *given: tuple[Tensor | None, ...]
    ) -> Any:
        """Instead of a backward hook of a module, which is given gradients, and may return others for the first."""
        num_first = len(given[0])

        def call(gradients: _Gradients) -> _Gradients:
            parts = tuple(gradients[:num_first]), tuple(gradients[num_first:])
            result = hook(module, *parts[: len(given)])
            return parts[0] if result is None else result if isinstance(result, tuple) else (result,)

        leaves = [one for part in given for one in part]
        before = [None if one is None else one.detach().clone() for one in leaves]
        versions = [None if one is None else version_of(one) for one in leaves]
        with self._factor.inside():
            result = hook(module, *given)
        if result is not None or versions != [None if one is None else version_of(one) for one in leaves]:
            self._try(hook, where, call, before)
        return result

    def _try_of_weights(
        self, hook: Callable[..., Any], weight: str, call: Callable[[_Gradients], _Gradients], given: _Gradients
    ) -> None:
        """Note a hook on what is made of weights that is not linear. Waits for the device."""
        if self.found:
            return
        with suppress(Exception):  # then it cannot be told
            trial = _Trial(call, given, self._factor)

            def made(gradients: GradientList, _: object) -> GradientList:
                with preserved_random_state(device):
                    return call(gradients)

            device = next(one.device for one in given if one is not None)
            parts = PartTrial(made, given, self._factor)
            wrong = trial.is_not_linear() or (parts.is_known and parts.is_not_linear())
            if wrong and trial.repeats():
                self.found = (
                    f"the hook {title_of(hook)!r} on the gradient of what is made of {weight} is called for a part of "
                    "the batch, and is not linear (it clips, normalises, adds or draws): its result depends on the "
                    "numbers of micro-batches and replicas. Change gradients of weights between backward and step "
                    "(optimizer.clip_grad_by_norm), use num_microbatches=1 and one replica, or, for a term that is "
                    "added, multiply it by booster.gradient_scale."
                )

    def _try(
        self, hook: Callable[..., Any], where: str, call: Callable[[_Gradients], _Gradients], given: _Gradients
    ) -> None:
        """Note a hook that makes something of samples together. Waits for the device."""
        if self.found:
            return
        trial = _Trial(call, given, self._factor)
        with suppress(Exception):  # then it cannot be told
            if trial.is_scalar:
                wrong = trial.is_not_linear()
            else:
                dims = trial.dims_of_samples(self._num_samples)
                wrong = bool(dims) and all(trial.couples(dim) for dim in dims)
            if wrong and trial.repeats():
                self.found = (
                    f"the hook {title_of(hook)!r} {where} is called for a part of the batch, and makes something of "
                    "all samples there together (their norm or mean, for example): its result depends on the numbers "
                    "of micro-batches and replicas. Change each sample, or each element, for itself; or use "
                    "num_microbatches=1 and one replica."
                )


class _Trial:
    """Further calls of a hook, with gradients that are no zeros and large, so that limits are reached.

    Args:
        call: calls it with gradients, and gives what it makes of them.
        given: that it has been called with.
        factor: see :class:`ActivationHooks`.
    """

    def __init__(self, call: Callable[[_Gradients], _Gradients], given: _Gradients, factor: GradientFactor):
        self._call, self._factor = call, factor
        tensors = [one for one in given if one is not None]
        largest = max((float(one.abs().max()) for one in tensors if one.numel()), default=0.0)
        self._multiple = factor_for(largest, {one.dtype for one in tensors}) if 0 < largest < float("inf") else 0.0
        self._given = [None if one is None else _spread(one, largest) for one in given]
        self._shapes = [one.shape for one in tensors]
        self.is_scalar = all(len(shape) == 0 for shape in self._shapes)

    def _run(self, gradients: _Gradients, multiple: float) -> list[Tensor | None]:
        scaled = [None if one is None else one * multiple for one in gradients]
        device = next(one.device for one in scaled if one is not None)
        with preserved_random_state(device), torch.no_grad(), self._factor.inside(multiple):
            return list(self._call(scaled))

    def dims_of_samples(self, num_samples: int | None) -> list[int]:
        """The dimensions that may be those of samples, 0 and 1 at most."""
        if not self._multiple:
            return []
        sizes = {
            dim: {shape[dim] for shape in self._shapes} for dim in (0, 1) if all(len(s) > dim for s in self._shapes)
        }
        shared = {dim: next(iter(found)) for dim, found in sizes.items() if len(found) == 1}
        if num_samples is not None:
            exact = [dim for dim, size in shared.items() if size == num_samples]
            if dims := exact or [dim for dim, size in shared.items() if size and size % num_samples == 0]:
                return dims
        return [dim for dim, size in shared.items() if size > 1]

    def couples(self, dim: int) -> bool:
        """Whether what it makes of one half depends on the other, along a dimension."""
        given: _Gradients = self._given
        if self._shapes[0][dim] == 1:  # of one sample: with another
            given = [None if one is None else torch.cat([one, -2 * one], dim) for one in given]
        size = next(one for one in given if one is not None).shape[dim]
        full = self._run(given, self._multiple)
        for start, length in ((0, size // 2), (size // 2, size - size // 2)):
            kept = partial(torch.narrow, dim=dim, start=start, length=length)
            part = self._run([None if one is None else _only(kept, one) for one in given], self._multiple)
            pairs = [(one, two) for one, two in zip(part, full, strict=True) if one is not None and two is not None]
            if any(one.dim() > dim and not _is_near(kept(one), kept(two)) for one, two in pairs):
                return True
        return False

    def is_not_linear(self) -> bool:
        """Whether a multiple of gradients does not give the same multiple."""
        if not self._multiple:
            return False
        once, often = self._run(self._given, 1.0), self._run(self._given, self._multiple)
        pairs = zip(once, often, strict=True)
        return any(not _is_near(two, one * self._multiple) for one, two in pairs if one is not None and two is not None)

    def repeats(self) -> bool:
        """Whether it makes the same of the same again."""
        first, again = self._run(self._given, self._multiple), self._run(self._given, self._multiple)
        pairs = zip(first, again, strict=True)
        return all(_is_near(two, one) for one, two in pairs if one is not None and two is not None)


def _spread(gradient: Tensor, largest: float) -> Tensor:
    """Gradients like these, of which none is zero, and which differ."""
    steps = torch.arange(1, gradient.numel() + 1, device=gradient.device, dtype=torch.float64)
    return (gradient.double() + largest * steps.cos().reshape(gradient.shape)).to(gradient.dtype)


def _only(kept: Callable[[Tensor], Tensor], gradient: Tensor) -> Tensor:
    """A gradient that is zero elsewhere."""
    part = torch.zeros_like(gradient)
    kept(part).copy_(kept(gradient))
    return part


def _is_near(one: Tensor, other: Tensor) -> bool:
    """Whether two results are equal, but for rounding; those with inf or NaN cannot be told apart."""
    one, other = one.double(), other.double()
    if not (one.isfinite().all() and other.isfinite().all()):
        return True
    return bool((one - other).abs().max() <= TOLERANCE * other.abs().max())


def _is_of_script(hook: Callable[..., Any]) -> bool:
    while isinstance(hook, partial):
        hook = hook.func
    module = getattr(hook, "__module__", None) or type(hook).__module__
    return not is_library_module(module)


class _RegisteredHooks(WatchingMode):
    """Lets ``around`` be called in place of the hooks that are registered on activations.

    Args:
        around: called with the hook, and the name of a weight if the tensor is made of weights alone.
        sources: tells what tensors are made of.
    """

    def __init__(self, around: Callable[..., Any], sources: Sources):
        super().__init__()
        self._around, self._sources = around, sources

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.register_hook and len(args) == 2 and not args[0].is_leaf and _is_of_script(args[1]):
            source = self._sources.of(args[0])
            args = args[0], partial(self._around, args[1], source.weight if source else "")
        result = func(*args, **with_lost_weight(func, kwargs or {}))
        self._sources.note(args, kwargs or {}, result)
        return result

    def made(self, result: Any) -> None:
        """Nothing is known of what ran compiled."""
