"""What the update of one element depends on, by optimizer: determined by trial, because no optimizer declares it."""

import copy
from collections import OrderedDict, defaultdict
from collections.abc import Collection, Sequence
from enum import IntEnum
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from hybridpp.cluster import preserved_random_state, random_state
from hybridpp.errors import ConfigError
from hybridpp.nn.torch_private import version_of
from hybridpp.optim.joined import JoinedOptimizer

# Some optimizers read other elements only from the second step on.
_NUM_STEPS = 3
# Large relative to the weights, so that rounding hides no difference between updates.
_LEARNING_RATE = 0.05
# By number of dimensions. A half along any dimension has more than 4096 elements, a multiple of 16 but not of a large
# power of 2: fused kernels round the remainder of a tensor differently, and 8-bit optimizers work on blocks.
_SHAPES = ((), (8224,), (34, 272), (6, 34, 48), (6, 34, 6, 8), (6, 34, 6, 4, 2))
_HOOKS = "_optimizer_"

FLAT = -1
"""In place of a dimension: the parameter is made flat before it is cut, as ZeRO does."""


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


def find_localities(
    optimizer: Optimizer, cuts: Sequence[Collection[tuple[int, int]]], device: torch.device
) -> list[Locality]:
    """The locality of each parameter group.

    Copies of the optimizer update random parameters: all together, one by one, and cut into halves. If the results are
    equal bit for bit, the update depends on nothing else. Neither the optimizer nor a random generator changes.

    Args:
        optimizer: with its settings, on parameters of any kind.
        cuts: for each group, how its parameters may be sharded: pairs of number of dimensions and sharded dimension,
            or :data:`FLAT`.
        device: where to run the copies.

    Raises:
        LocalityUnknown: a copy raised, produced inf or NaN, or drew random numbers.
        ConfigError: a copy wrote to the optimizer's own parameters.
    """
    if isinstance(optimizer, JoinedOptimizer):
        return _find_of_each(optimizer, cuts, device)
    standins, standin_of = _standins(optimizer.param_groups, cuts, device)
    versions = _versions(optimizer)
    with preserved_random_state(device), torch.no_grad():
        before = random_state(device)
        try:
            found = _compare(optimizer, standins)
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
    return [Locality.ELEMENTS if at is None else found[at] for at in standin_of]


def _find_of_each(
    joined: JoinedOptimizer, cuts: Sequence[Collection[tuple[int, int]]], device: torch.device
) -> list[Locality]:
    found: list[Locality] = []
    for one in joined.optimizers:
        found += find_localities(one, cuts[len(found) :][: len(one.param_groups)], device)
    return found


def _versions(optimizer: Optimizer) -> list[int]:
    return [version_of(parameter) for group in optimizer.param_groups for parameter in group["params"]]


class _StandIn:
    """A random parameter with its gradients.

    Args:
        real: the parameter that it replaces.
        group_index: index of the parameter group.
        dims: dimensions along which it is cut.
        generator: draws the numbers.
        device: where the numbers are.
    """

    def __init__(
        self, real: Tensor, group_index: int, dims: Collection[int], generator: torch.Generator, device: torch.device
    ):
        self.real, self.group_index, self.dims = real, group_index, sorted(dims)
        shape, dtype = _shape(real.dim()), torch.promote_types(real.dtype, torch.float32)
        draws = [torch.randn(shape, generator=generator, dtype=dtype) for _ in range(_NUM_STEPS + 1)]
        weights, *gradients = [draw * 0.1 * (group_index + 1) for draw in draws]
        # Rows and columns of different magnitude, as an optimizer may normalise over either.
        if real.dim():
            slope = torch.linspace(0.5, 2.0, shape[0]).reshape(-1, *[1] * (real.dim() - 1))
            gradients = [(gradient * slope).to(dtype) for gradient in gradients]
        self.weights = weights.to(device)
        self.gradients = [gradient.to(device) for gradient in gradients]

    def part(self, dim: int | None, half: int) -> "_StandIn":
        """One of two halves along ``dim``; the complete parameter if ``dim`` is None."""
        part = copy.copy(self)
        if dim is not None:
            part.weights, *part.gradients = [_half(tensor, dim, half) for tensor in (self.weights, *self.gradients)]
        return part


def _half(tensor: Tensor, dim: int, half: int) -> Tensor:
    cut = tensor.flatten().chunk(2) if dim == FLAT else tensor.chunk(2, dim)
    return cut[half].contiguous()


def _shape(num_dims: int) -> tuple[int, ...]:
    most = len(_SHAPES) - 1
    return (*[2] * (num_dims - most), *_SHAPES[min(num_dims, most)])


def _standins(
    groups: Sequence[dict[str, Any]], cuts: Sequence[Collection[tuple[int, int]]], device: torch.device
) -> tuple[list[_StandIn], list[int | None]]:
    """A stand-in for each kind of parameter in each kind of group, and the kind of each group."""
    generator = torch.Generator().manual_seed(0)
    first_of: dict[Any, int] = {}
    kinds: list[int | None] = []
    needed: dict[tuple[int, int], tuple[Tensor, set[int]]] = {}
    for group_index, (group, divided) in enumerate(zip(groups, cuts, strict=True)):
        if not group["params"]:
            kinds.append(None)
            continue
        kinds.append(kind := first_of.setdefault(_signature(group), group_index))
        for parameter in group["params"]:
            dims = {dim for num_dims, dim in divided if num_dims == parameter.dim()}
            needed.setdefault((kind, parameter.dim()), (parameter, set()))[1].update(dims)
    made = [_StandIn(real, kind, dims, generator, device) for (kind, _), (real, dims) in needed.items()]
    return made, kinds


def _signature(group: dict[str, Any]) -> Any:
    """Equal for groups that differ only in numbers such as the learning rate."""
    return tuple((key, _kind(value)) for key, value in sorted(group.items()) if key not in ("params", "param_names"))


def _kind(value: Any) -> Any:
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, list | tuple):
        return tuple(map(_kind, value))
    return type(value), isinstance(value, int | float) and value == 0


def _compare(optimizer: Optimizer, standins: list[_StandIn]) -> dict[int, Locality]:
    """The locality of each group that has stand-ins."""
    found = dict.fromkeys((one.group_index for one in standins), Locality.ELEMENTS)
    together = _stepped(optimizer, standins)
    if not all(bool(weights.isfinite().all()) for weights in together):
        raise LocalityUnknown("it produces inf or NaN")
    for number in range(max(len(one.dims) for one in standins)):
        dims = [one.dims[number] if number < len(one.dims) else None for one in standins]
        first, second = (
            _stepped(optimizer, [one.part(dim, half) for one, dim in zip(standins, dims, strict=True)])
            for half in (0, 1)
        )
        for one, dim, uncut, *halves in zip(standins, dims, together, first, second, strict=True):
            if dim is not None and not torch.equal(torch.cat(halves, max(dim, 0)).view_as(uncut), uncut):
                found[one.group_index] = Locality.PARAMETERS
    for one, expected in zip(standins, together, strict=True):
        if not torch.equal(_stepped(optimizer, [one])[0], expected):
            found[one.group_index] = Locality.EVERYTHING
    return found


def _stepped(optimizer: Optimizer, standins: list[_StandIn]) -> list[Tensor]:
    """The stand-ins' weights after some steps of a copy of the optimizer."""
    try:
        return _steps(optimizer, standins, with_state=False)
    except KeyError:
        # Some create their state in the constructor (Adagrad).
        return _steps(optimizer, standins, with_state=True)


def _steps(optimizer: Optimizer, standins: list[_StandIn], with_state: bool) -> list[Tensor]:
    parameters = [nn.Parameter(one.weights.clone()) for one in standins]
    trial = _copy(optimizer, standins, parameters)
    if with_state:
        for one, parameter in zip(standins, parameters, strict=True):
            trial.state[parameter] = {
                key: _like(value, one.real, parameter) for key, value in optimizer.state[one.real].items()
            }
    step = type(trial).step
    # Without the hooks that torch calls around every optimizer's step: this is not an optimizer of the script.
    step = getattr(step, "__wrapped__", step) if getattr(step, "hooked", False) else step
    for number in range(_NUM_STEPS):
        for one, parameter in zip(standins, parameters, strict=True):
            parameter.grad = one.gradients[number].clone()
        step(trial)
    return [parameter.detach() for parameter in parameters]


def _copy(optimizer: Optimizer, standins: list[_StandIn], parameters: list[nn.Parameter]) -> Optimizer:
    """A copy that works on other parameters and holds no reference to the real ones."""
    trial: Optimizer = object.__new__(type(optimizer))
    vars(trial)["state"] = defaultdict(dict)
    # References to the real parameters become references to the copy's.
    memo: dict[int, Any] = {id(optimizer): trial, id(optimizer.state): trial.state}
    memo.update({id(real): parameters[0] for group in optimizer.param_groups for real in group["params"]})
    groups = []
    for group_index, group in enumerate(optimizer.param_groups):
        of_group = [
            parameter for one, parameter in zip(standins, parameters, strict=True) if one.group_index == group_index
        ]
        settings = {key: copy.deepcopy(value, memo) for key, value in group.items() if key != "params"}
        if "param_names" in settings:
            settings["param_names"] = [str(number) for number in range(len(of_group))]
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


def _like(value: Any, real: Tensor, parameter: Tensor) -> Any:
    """The initial state of the real parameter, for a stand-in of another shape."""
    if isinstance(value, Tensor) and value.dim() == real.dim() and value.dim():
        return torch.full_like(parameter, value.reshape(-1)[0].item(), dtype=value.dtype)
    return value.to(parameter.device, copy=True) if isinstance(value, Tensor) else copy.deepcopy(value)
