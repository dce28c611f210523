"""What the update of one element depends on, by optimizer: determined by trial, because no optimizer declares it."""

import copy
import inspect
import math
from collections import OrderedDict, defaultdict
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, replace
from enum import IntEnum
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.overrides import TorchFunctionMode

from hybridpp.cluster import preserved_random_state, random_state
from hybridpp.code_owner import is_library_module
from hybridpp.errors import ConfigError
from hybridpp.nn.force_eager import force_eager, may_hold_compiled_code
from hybridpp.nn.torch_private import TorchDispatchMode, pytree, schema_of, version_of

# Some optimizers read other elements only from the second step on.
_NUM_STEPS = 3
# A rule may change behind a warm-up. Without values these steps cost milliseconds; with values they are taken only if
# it does.
_MANY_STEPS = 24
# A limit on all parameters' gradients is crossed by some of them and not by others, wherever it is.
_LEAST_EXPONENT, _MOST_EXPONENT = -6.0, 3.0
_SHARE_OF_ZEROS = 0.15
# Large relative to the weights, so that rounding hides no difference between updates.
_LEARNING_RATE = 0.05
# Up to so many elements, a parameter is tried in its own shape; a larger one in a smaller shape, at first.
_OWN_SHAPE = 2**15
# The same, for a rule that treats the smaller shape otherwise.
_OWN_SHAPE_AT_LAST = 2**20
# Sizes of the pieces that a flat parameter is cut into, before the rest: below and above the 4096 elements from which
# on 8-bit optimizers quantise, in full blocks of 256 and not. Multiples of 16 elements, because fused kernels round the
# remainder of a tensor differently.
_ALIGNMENT = 16
_FLAT_PIECES = (4096, 16, 256, 8224, 2**16, 2**20)
# Sizes of pieces that a large parameter may be cut into.
_MORE_PIECES = (1, 255, 2**16, 2**20, 2**24 + 1, 2**27)
_FACTORIES = frozenset({torch.tensor, torch.as_tensor, torch.zeros, torch.ones, torch.full, torch.empty})
# Their results may be as large as what they are given.
_PRODUCTS = frozenset({"mm", "addmm", "bmm", "baddbmm", "mv", "addmv", "dot", "vdot", "cumsum", "cumprod", "sort"})
_HOOKS = "_optimizer_"

FLAT = -1
"""In place of a dimension: the parameter is made flat before it is cut, anywhere, as ZeRO does."""


class Locality(IntEnum):
    """What the update of one element depends on.

    Attributes:
        ELEMENTS: only that element's gradients and state, as in AdamW: parameters may be sharded.
        PARAMETERS: other elements of the parameter too, as in Adafactor or Muon: parameters must be unsharded.
        EVERYTHING: other parameters too: all must be on one rank.
    """

    ELEMENTS = 0
    PARAMETERS = 1
    EVERYTHING = 2


class LocalityUnknown(Exception):
    """Why an optimizer could not be run on random parameters."""


@dataclass(frozen=True)
class Cut:
    """How a parameter may be sharded.

    Attributes:
        shape: of the complete parameter.
        dim: along which it is cut, or :data:`FLAT`; None: it is not.
        width: of each part along ``dim``; the last may be smaller.
    """

    shape: tuple[int, ...]
    dim: int | None = None
    width: int = 0

    @property
    def num_elements(self) -> int:
        """Of the complete parameter."""
        return prod(self.shape)

    @property
    def rounds_alike(self) -> bool:
        """Whether kernels round each element as in the complete parameter: all parts are multiples of 16 elements."""
        if self.dim == FLAT:
            return self.num_elements > _ALIGNMENT
        return not any(prod(shape) % _ALIGNMENT for shape in (self.shape, *self.part_shapes()))

    def parts(self, tensor: Tensor) -> list[Tensor]:
        """The parts of a tensor of :attr:`shape`, in memory of their own; the tensor if it is not cut."""
        if self.dim is None:
            return [tensor]
        if self.dim == FLAT:
            return [part.clone() for part in torch.split(tensor.flatten(), self._flat_pieces())]
        return [part.contiguous() for part in torch.split(tensor, self.width, self.dim)]

    def joined(self, parts: Sequence[Tensor]) -> Tensor:
        """The complete tensor, from its parts."""
        return parts[0] if self.dim is None else torch.cat(list(parts), max(self.dim, 0)).view(self.shape)

    def part_shapes(self) -> list[tuple[int, ...]]:
        """Shapes that parts have."""
        if self.dim is None:
            return []
        if self.dim == FLAT:
            return [(size,) for size in self._flat_pieces()]
        before, length, after = self.shape[: self.dim], self.shape[self.dim], self.shape[self.dim + 1 :]
        widths = {self.width, length % self.width} - {0}
        return [(*before, width, *after) for width in sorted(widths)]

    def possible_shapes(self) -> list[tuple[int, ...]]:
        """Shapes that parts have, or may have where the cuts are anywhere."""
        more = [(size,) for size in _MORE_PIECES if size < self.num_elements] if self.dim == FLAT else []
        return self.part_shapes() + more

    def _flat_pieces(self) -> list[int]:
        left = self.num_elements
        if left <= _ALIGNMENT:
            return [left // 2, left - left // 2]
        sizes = []
        for size in _FLAT_PIECES:
            if left > size:
                sizes.append(size)
                left -= size
        return [*sizes, left]

    def smaller(self, most: int, base: int) -> "Cut":
        """A smaller parameter that a rule will probably treat in the same way; the same one up to ``most`` elements.

        Small dimensions stay. Large ones become the first multiples of ``base``, the larger the dimension the larger
        the multiple, and keep their remainder of it: equal dimensions stay equal, and divisible ones divisible.

        Args:
            most: elements of what stays as it is.
            base: a power of two.
        """
        if self.num_elements <= most:
            return self
        lengths = list(self.shape)
        if self.dim is not None and self.dim != FLAT:
            lengths[self.dim] = self.width
        large = sorted({length for length in lengths if length > 2 * base})
        unit = base
        if sum(length in large for length in lengths) == 1:
            # The only one: as large as the parameter may be.
            small = prod(length for length in lengths if length not in large)
            unit = max(base, base // small * base)
        lengths = [
            unit * (large.index(length) + 1) + length % base if length in large else length for length in lengths
        ]
        width = self.width
        if self.dim is not None and self.dim != FLAT:
            width = lengths[self.dim]
            lengths[self.dim] *= min(2, -(-self.shape[self.dim] // self.width))
        for dim, length in enumerate(lengths):
            # Of what is stacked (experts), fewer.
            if prod(lengths) > 32 * base * base and length > 16 and dim != self.dim:
                lengths[dim] = 8 + length % 8
        return Cut(tuple(lengths), self.dim, width)


def find_localities(optimizer: Optimizer, cuts: Sequence[Sequence[Cut]], device: torch.device) -> list[list[Locality]]:
    """The locality of each parameter of each group.

    Copies of the optimizer update random parameters: all together, one by one, and cut. If the results are equal bit
    for bit, the update depends on nothing else. Parameters are tried in their own shapes, because a rule may depend on
    sizes. In place of a large one a smaller one is tried; a copy without values (on the meta device) then shows whether
    the optimizer runs the same operations on the parameter's own shape. A parameter whose parts the optimizer refuses
    is updated whole. Neither the optimizer nor a random generator changes.

    Args:
        optimizer: with its settings, on parameters of any kind; of several that are joined, one of them.
        cuts: for each group, how each of its parameters may be sharded.
        device: where to run the copies.

    Raises:
        LocalityUnknown: a copy raised, produced inf or NaN, or drew random numbers.
        ConfigError: a copy wrote to the optimizer's own parameters.
    """
    trial = _Trial(optimizer, cuts, device)
    versions = _versions(optimizer)
    with preserved_random_state(device), torch.no_grad(), _eagerly(optimizer):
        before = random_state(device)
        try:
            found = trial.run()
        except Exception as error:  # an optimizer may raise anything
            raise LocalityUnknown(repr(error)) from error
        after = random_state(device)
        pairs = zip(before, after, strict=True)
        if not all(one is None or other is None or torch.equal(one, other) for one, other in pairs):
            raise LocalityUnknown("it draws random numbers")
    if _versions(optimizer) != versions:
        raise ConfigError(
            f"a copy of {type(optimizer).__name__} on other parameters wrote to the model's, so it keeps references to "
            "parameters outside of param_groups and state. Let its step read them from param_groups."
        )
    return found


def _eagerly(optimizer: Optimizer) -> AbstractContextManager[None]:
    """A context in which an optimizer that compiles its update does not."""
    return force_eager() if may_hold_compiled_code() or compiles_update(optimizer) else nullcontext()


def compiles_update(optimizer: Optimizer) -> bool:
    """Whether a class of an optimizer compiles something."""
    functions = [member for cls in type(optimizer).__mro__ for member in vars(cls).values() if callable(member)]
    names = {
        name for one in functions if (code := getattr(inspect.unwrap(one), "__code__", None)) for name in code.co_names
    }
    return "compile" in names


def _versions(optimizer: Optimizer) -> list[int]:
    return [version_of(parameter) for group in optimizer.param_groups for parameter in group["params"]]


@dataclass(frozen=True)
class _Tensors:
    """A parameter that a copy of the optimizer updates, with its gradients.

    Attributes:
        real: the parameter that it replaces.
        group_index: index of the parameter group.
        weights: before the first step.
        gradients: one for each step.
    """

    real: Tensor
    group_index: int
    weights: Tensor
    gradients: tuple[Tensor, ...]

    @classmethod
    def without_values(
        cls, real: Tensor, group_index: int, shape: Sequence[int], num_steps: int = _NUM_STEPS
    ) -> "_Tensors":
        """On the meta device."""
        weights = torch.empty(tuple(shape), dtype=_dtype(real), device="meta")
        return cls(real, group_index, weights, (weights,) * num_steps)

    @classmethod
    def random(
        cls, real: Tensor, group_index: int, shape: Sequence[int], generator: torch.Generator, device: torch.device
    ) -> "_Tensors":
        """With random numbers."""
        draws = [torch.randn(tuple(shape), generator=generator, dtype=_dtype(real)) for _ in range(_NUM_STEPS + 1)]
        weights, first, *others = [draw * 0.1 * (group_index + 1) for draw in draws]
        # In similar directions, as optimizers that find a step size grow it then, and each larger than the one before
        # it, so that what is done to large gradients only is done.
        gradients = [first, *((first + other * 0.5) * 10**number for number, other in enumerate(others, 1))]
        # Rows and columns of different magnitude, as an optimizer may normalise over either.
        if shape:
            slope = torch.linspace(0.5, 2.0, shape[0]).reshape(-1, *[1] * (len(shape) - 1))
            gradients = [(gradient * slope).to(gradient.dtype) for gradient in gradients]
        return cls(real, group_index, weights.to(device), tuple(gradient.to(device) for gradient in gradients))

    def repeated(self, num_steps: int) -> "_Tensors":
        """With gradients for more steps: the last one again and again."""
        return replace(self, gradients=(*self.gradients, *self.gradients[-1:] * (num_steps - len(self.gradients))))

    def unlike(self, num_steps: int, generator: torch.Generator) -> "_Tensors":
        """With gradients of another direction and magnitude in each step; some have zeros, or are nothing else."""
        span = _MOST_EXPONENT - _LEAST_EXPONENT
        gradients = []
        for _ in range(num_steps):
            exponent, kind = torch.rand(2, generator=generator).tolist()
            drawn = torch.randn(self.weights.shape, generator=generator, dtype=self.weights.dtype)
            share = 1.0 if kind < _SHARE_OF_ZEROS else 0.5 if kind < 3 * _SHARE_OF_ZEROS else 0.0
            kept = torch.rand(self.weights.shape, generator=generator) >= share
            gradients.append((drawn * kept * 10 ** (exponent * span + _LEAST_EXPONENT)).to(self.weights.device))
        return replace(self, gradients=tuple(gradients))

    def not_finite(self) -> "_Tensors":
        """With one gradient of NaN."""
        return replace(self, gradients=(*self.gradients[:1], self.gradients[0] * math.nan, *self.gradients[2:]))

    def parts(self, cut: Cut) -> "list[_Tensors]":
        """Its parts."""
        weights, *gradients = [cut.parts(tensor) for tensor in (self.weights, *self.gradients)]
        of_parts = zip(*gradients, strict=True)
        return [replace(self, weights=part, gradients=own) for part, own in zip(weights, of_parts, strict=True)]


def _dtype(real: Tensor) -> torch.dtype:
    return torch.promote_types(real.dtype, torch.float32)


@dataclass(frozen=True)
class _StandIn:
    """A random parameter in place of some of the optimizer's.

    Attributes:
        complete: the numbers.
        cut: what they are cut into.
    """

    complete: _Tensors
    cut: Cut

    def parts(self) -> list[_Tensors]:
        """The parts of the numbers."""
        return self.complete.parts(self.cut)


class _Trial:
    """The trial of one optimizer; arguments as of :func:`find_localities`."""

    def __init__(self, optimizer: Optimizer, cuts: Sequence[Sequence[Cut]], device: torch.device):
        self._optimizer, self._device = optimizer, device
        self._generator = torch.Generator().manual_seed(0)
        self._num_steps = _NUM_STEPS
        self._standins: list[_StandIn] = []
        # The stand-in of each parameter of each group, by its number, and what it stands for; None: nothing is needed.
        self._of_parameters: list[list[tuple[int, Cut] | None]] = []
        self._recorded: dict[Any, list[Any]] = {}
        self._make_standins(cuts)

    def _make_standins(self, cuts: Sequence[Sequence[Cut]]) -> None:
        """A stand-in for each kind of parameter in each kind of group."""
        first_of: dict[Any, int] = {}
        numbers: dict[Any, int] = {}
        for group_index, (group, of_group) in enumerate(zip(self._optimizer.param_groups, cuts, strict=True)):
            kind = first_of.setdefault(_signature(group), group_index) if group["params"] else group_index
            found: list[tuple[int, Cut] | None] = []
            for parameter, cut in zip(group["params"], of_group, strict=True):
                if not cut.num_elements:
                    found.append(None)
                    continue
                small = cut.smaller(_OWN_SHAPE, 128)
                # A rule may tell parameters apart by attributes that the script has set on them.
                key = kind, small, _dtype(parameter), _signature(attributes_of(parameter))
                number = numbers.setdefault(key, len(self._standins))
                if number == len(self._standins):
                    self._standins.append(self._random(parameter, kind, small))
                found.append((number, cut))
            self._of_parameters.append(found)

    def _random(self, real: Tensor, group_index: int, cut: Cut) -> _StandIn:
        complete = _Tensors.random(real, group_index, cut.shape, self._generator, self._device)
        return _StandIn(complete.repeated(self._num_steps), cut)

    def _changes_later(self, one: _StandIn) -> bool:
        """Whether the optimizer mixes elements in later steps only."""
        if is_library_module(type(self._optimizer).__module__):
            return False
        real, group_index = one.complete.real, one.complete.group_index
        small = self._random(real, group_index, Cut(one.cut.shape).smaller(256, 8)).complete

        def mixes(num_steps: int) -> bool:
            operations = OperationsWatch()
            with suppress(Exception), operations, _ScalarsOnHost():
                self._stepped([_Tensors.without_values(real, group_index, one.cut.shape, num_steps)])
                return operations.mixes
            # It reads numbers, which are there in a small parameter only.
            with suppress(Exception), operations:
                self._stepped([small.repeated(num_steps)])
            return operations.mixes

        return mixes(_MANY_STEPS) and not mixes(_NUM_STEPS)

    def run(self) -> list[list[Locality]]:
        """The locality of each parameter of each group."""
        found = [Locality.ELEMENTS] * len(self._standins)
        if any(self._changes_later(one) for one in self._standins):
            self._num_steps = _MANY_STEPS
            self._standins = [replace(one, complete=one.complete.repeated(_MANY_STEPS)) for one in self._standins]
        mixing: list[int] = []
        if self._standins:
            together = self._stepped([one.complete for one in self._standins])
            if not all(bool(updated.weights.isfinite().all()) for updated in together):
                raise LocalityUnknown("it produces inf or NaN")
            for number, one in enumerate(self._standins):
                with OperationsWatch() as operations:
                    (alone,) = self._stepped([one.complete])
                # Even if nothing came of it here: AdamP projects gradients that are at right angles to the weights.
                if operations.mixes:
                    found[number] = Locality.PARAMETERS
                    mixing.append(number)
                with_others = together[number]
                # What it notes about all parameters may act later only (a step size that is still found).
                if not torch.equal(alone.weights, with_others.weights) or alone.settings != with_others.settings:
                    found[number] = Locality.EVERYTHING
            if mixing and Locality.EVERYTHING not in found and self._have_limit([self._standins[n] for n in mixing]):
                found = [Locality.EVERYTHING] * len(found)
            # Of others the answer is known, and parts may cost much: Kron and Shampoo square their lengths.
            asked = [number for number, locality in enumerate(found) if locality is Locality.ELEMENTS]
            for number, of_parts in zip(asked, self._of_parts([self._standins[n] for n in asked]), strict=True):
                if not _same(self._standins[number].cut, of_parts, together[number].weights):
                    found[number] = Locality.PARAMETERS
        of_cuts: dict[tuple[int, Cut] | None, Locality] = {None: Locality.ELEMENTS}
        for number, cut in dict.fromkeys(item for of_group in self._of_parameters for item in of_group if item):
            # One that mixes elements of a small parameter is not asked about a large one.
            is_alike = found[number] or self._treats_alike(self._standins[number], cut)
            of_cuts[number, cut] = found[number] if is_alike else Locality.PARAMETERS
        return [[of_cuts[item] for item in of_group] for of_group in self._of_parameters]

    def _have_limit(self, standins: Sequence[_StandIn]) -> bool:
        """Whether the update of one parameter ends at a limit on others, as one that leaves out a step by all norms.

        Gradients of all that are tried grow alike, so that all or none are beyond a limit. Here each has a magnitude of
        its own in each step, long enough for a mean of steps.

        Args:
            standins: of parameters of which the optimizer reads several elements together.
        """
        kinds = {(one.complete.group_index, len(one.cut.shape)): one for one in standins}
        given: list[_Tensors] = []
        for one in kinds.values():
            small, index = Cut(one.cut.shape).smaller(256, 8), one.complete.group_index
            for _ in range(2):
                complete = self._random(one.complete.real, index, small).complete
                given.append(complete.unlike(_MANY_STEPS, self._generator))
        alone = [self._stepped([one])[0] for one in given]
        if any(map(_differ, alone, self._stepped(given))):
            return True
        # One that leaves out a step for a gradient that is not finite: those of others are.
        first, *others = given
        with suppress(Exception):  # a decomposition of NaN fails, as that of the gradient alone would
            return any(map(_differ, alone[1:], self._stepped([first.not_finite(), *others])[1:]))
        return False

    def _of_parts(self, standins: Sequence[_StandIn]) -> list[list[Tensor] | None]:
        """The weights of each stand-in's parts after some steps; None where the optimizer refuses them."""
        parts = [one.parts() for one in standins]
        try:
            stepped = iter(self._stepped([part for of_one in parts for part in of_one]))
        except Exception:
            # Their shapes, because it takes the complete parameters: Muon takes matrices only.
            return [None] if len(standins) == 1 else [self._of_parts([one])[0] for one in standins]
        return [[next(stepped).weights for _ in of_one] for of_one in parts]

    def _treats_alike(self, one: _StandIn, cut: Cut) -> bool:
        """Whether the optimizer updates a larger parameter element by element, too, as it does a stand-in."""
        if cut == one.cut or cut.dim is None:
            return True
        is_alike: bool | None = None
        # It may read values, or run what the meta device has not.
        with suppress(Exception):
            is_alike = self._runs_alike(one, cut)
        if is_alike:
            return True
        if is_alike is not None and cut.num_elements > _OWN_SHAPE_AT_LAST:
            return False
        larger = self._random(one.complete.real, one.complete.group_index, cut.smaller(_OWN_SHAPE_AT_LAST, 512))
        (uncut,), (of_parts,) = self._stepped([larger.complete]), self._of_parts([larger])
        return _same(larger.cut, of_parts, uncut.weights)

    def _runs_alike(self, one: _StandIn, cut: Cut) -> bool:
        """Whether it runs the same operations on a larger parameter, and on its parts, as on those of a stand-in."""
        if self._operations(one, cut.shape) != self._operations(one, one.cut.shape):
            return False
        expected = self._operations(one, one.cut.part_shapes()[0])
        return all(self._operations(one, shape) == expected for shape in cut.possible_shapes())

    def _operations(self, one: _StandIn, shape: Sequence[int]) -> list[Any]:
        """The operations of some steps, on a tensor without values."""
        real, group_index = one.complete.real, one.complete.group_index
        key = group_index, _dtype(real), tuple(shape), _signature(attributes_of(real))
        if key not in self._recorded:
            with OperationsWatch() as operations, _ScalarsOnHost():
                self._stepped([_Tensors.without_values(real, group_index, shape, self._num_steps)])
            self._recorded[key] = operations.found
        return self._recorded[key]

    def _stepped(self, tensors: Sequence[_Tensors]) -> "list[_Updated]":
        """What there is after some steps of a copy of the optimizer."""
        try:
            return self._steps(tensors, with_state=False)
        except KeyError:
            # Some create their state in the constructor (Adagrad).
            return self._steps(tensors, with_state=True)

    def _steps(self, tensors: Sequence[_Tensors], with_state: bool) -> "list[_Updated]":
        parameters = [nn.Parameter(one.weights.clone()) for one in tensors]
        for one, parameter in zip(tensors, parameters, strict=True):
            attributes = attributes_of(one.real).items()
            vars(parameter).update((key, _attribute(value, one.real, parameter)) for key, value in attributes)
        trial = _copy(self._optimizer, tensors, parameters)
        if with_state:
            for one, parameter in zip(tensors, parameters, strict=True):
                trial.state[parameter] = {
                    key: _like(value, one.real, parameter) for key, value in self._optimizer.state[one.real].items()
                }
        train = getattr(trial, "train", None)
        if callable(train):
            train()  # schedule-free optimizers step in this mode only
        step = type(trial).step
        # Without the hooks that torch calls around every optimizer's step: this is not an optimizer of the script.
        step = getattr(step, "__wrapped__", step) if getattr(step, "hooked", False) else step
        for number in range(len(tensors[0].gradients)):
            for one, parameter in zip(tensors, parameters, strict=True):
                parameter.grad = one.gradients[number].clone()
            step(trial)
        settings = [{key: _number(value) for key, value in group.items()} for group in trial.param_groups]
        return [
            _Updated(parameter.detach(), settings[one.group_index])
            for one, parameter in zip(tensors, parameters, strict=True)
        ]


class _Updated(NamedTuple):
    """What an optimizer has made of a parameter.

    Attributes:
        weights: of the parameter.
        settings: numbers of its group.
    """

    weights: Tensor
    settings: dict[str, Any]


def _differ(one: _Updated, other: _Updated) -> bool:
    is_same = torch.equal(one.weights.nan_to_num(), other.weights.nan_to_num())
    return not is_same or one.settings != other.settings


def _number(value: Any) -> Any:
    """A value, if it is a number; else None."""
    if isinstance(value, Tensor) and value.numel() == 1 and not value.is_meta:
        return value.item()
    return value if isinstance(value, int | float | complex) else None


def _same(cut: Cut, parts: Sequence[Tensor] | None, uncut: Tensor) -> bool:
    """Whether a parameter has been updated as its parts were."""
    if parts is None:
        return False
    joined = cut.joined(parts)
    if cut.rounds_alike:
        return torch.equal(joined, uncut)
    return bool((joined - uncut).abs().max() <= 1e-6 * uncut.abs().max())


class OperationsWatch(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's __init_subclass__
    """Records the operations that run, with numbers of dimensions and dtypes of what they are given.

    Attributes:
        found: what ran.
        mixes: whether something was computed of several elements of a tensor: a sum, a product of matrices.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch
        self.found: list[Any] = []
        self.mixes: bool = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = list(_tensors(args, kwargs))
        self.found.append((func, [(tensor.dim(), tensor.dtype) for tensor in given]))
        result = func(*args, **(kwargs or {}))
        self.mixes |= _mixes(func, given, result)
        return result


def _mixes(func: Any, given: Sequence[Tensor], result: Any) -> bool:
    """Whether an operator computes a number of several elements."""
    name = schema_of(func).name.rpartition("::")[2].removeprefix("linalg_")
    if name in _PRODUCTS:
        return True
    is_view = any(value.alias_info is not None and not value.alias_info.is_write for value in schema_of(func).returns)
    if is_view or name.startswith("new_"):
        return False
    sizes = [tensor.numel() for tensor in given if tensor.numel() > 1]
    found = [tensor.numel() for tensor in _tensors(result)]
    return bool(sizes and found) and max(found) < min(sizes)


class _ScalarsOnHost(TorchFunctionMode):
    """Makes scalars with values that would be made on the meta device: counts of steps, which optimizers read."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if func in _FACTORIES and result.is_meta and not result.dim():
            return func(*args, **kwargs | {"device": "cpu"})
        return result


def _tensors(*trees: Any) -> Iterator[Tensor]:
    return (leaf for leaf in pytree.tree_leaves(trees) if isinstance(leaf, Tensor))


def _signature(group: dict[str, Any]) -> Any:
    """Equal for groups that differ only in numbers such as the learning rate."""
    return tuple((key, _kind(value)) for key, value in sorted(group.items()) if key not in ("params", "param_names"))


def _kind(value: Any) -> Any:
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, list | tuple):
        return tuple(map(_kind, value))
    return type(value), isinstance(value, int | float) and value == 0


def _copy(optimizer: Optimizer, tensors: Sequence[_Tensors], parameters: list[nn.Parameter]) -> Optimizer:
    """A copy that works on other parameters and holds no reference to the real ones."""
    trial: Optimizer = object.__new__(type(optimizer))
    vars(trial)["state"] = defaultdict(dict)
    # References to the real parameters become references to the copy's.
    memo: dict[int, Any] = {id(optimizer): trial, id(optimizer.state): trial.state}
    memo.update({id(real): parameters[0] for group in optimizer.param_groups for real in group["params"]})
    groups = []
    for group_index, group in enumerate(optimizer.param_groups):
        of_group = [
            parameter for one, parameter in zip(tensors, parameters, strict=True) if one.group_index == group_index
        ]
        settings = {key: copy.deepcopy(value, memo) for key, value in group.items() if key != "params"}
        if "param_names" in settings:
            settings["param_names"] = [str(number) for number in range(len(of_group))]
        if of_group and of_group[0].is_meta and settings.get("fused"):
            settings["fused"] = False  # there are no kernels
        groups.append(_with_learning_rate({"params": of_group, **settings}))
        memo[id(group)] = groups[-1]
    memo[id(optimizer.param_groups)] = vars(trial)["param_groups"] = groups
    for name, value in vars(optimizer).items():
        if name.startswith(_HOOKS):
            vars(trial)[name] = OrderedDict()
        elif name not in ("state", "param_groups", "step"):  # LR schedulers set a step attribute on the object
            vars(trial)[name] = copy.deepcopy(value, memo)
    return trial


def _with_learning_rate(group: dict[str, Any]) -> dict[str, Any]:
    # With a learning rate of 0, as at the start of a warm-up, no optimizer changes anything.
    learning_rate = group.get("lr")
    if isinstance(learning_rate, Tensor):
        group["lr"] = torch.full_like(learning_rate, _LEARNING_RATE)
    elif isinstance(learning_rate, int | float) and not isinstance(learning_rate, bool):
        group["lr"] = _LEARNING_RATE
    return group


def attributes_of(parameter: Tensor) -> dict[str, Any]:
    """What a script has set on a parameter. The attributes of a tensor of another class may be what it is made of."""
    is_plain = type(parameter).__torch_dispatch__ is Tensor.__torch_dispatch__
    return vars(parameter) if is_plain else {}


def _attribute(value: Any, real: Tensor, parameter: Tensor) -> Any:
    """What the script has set on the real parameter, for a stand-in."""
    if isinstance(value, list | dict | set | Tensor):
        return _like(value, real, parameter)
    return value


def _like(value: Any, real: Tensor, parameter: Tensor) -> Any:
    """The initial state of the real parameter, for a stand-in of another shape."""
    if isinstance(value, Tensor) and value.dim() == real.dim() and value.dim():
        return torch.full_like(parameter, value.reshape(-1)[0].item(), dtype=value.dtype)
    if isinstance(value, Tensor) and not (parameter.is_meta and not value.dim()):
        return value.to(parameter.device, copy=True)
    return copy.deepcopy(value)
