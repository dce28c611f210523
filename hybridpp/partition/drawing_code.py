"""Which code may draw random numbers in some forwards and not in others, by the names of what it calls."""

import inspect
from collections.abc import Collection, Iterator
from types import FunctionType
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

from torch import nn

from hybridpp.nn import walk
from hybridpp.nn.torch_private import children_of
from hybridpp.partition.hook_inspection import names_in

_DRAWS = frozenset(
    (
        "rand",
        "rand_like",
        "randn",
        "randn_like",
        "randint",
        "randint_like",
        "randperm",
        "random_",
        "normal",
        "normal_",
        "log_normal_",
        "uniform_",
        "exponential_",
        "geometric_",
        "cauchy_",
        "bernoulli",
        "bernoulli_",
        "binomial",
        "poisson",
        "multinomial",
        "gumbel_softmax",
        "rrelu",
        "rrelu_",
        "fractional_max_pool2d",
        "fractional_max_pool3d",
        "sample",
        "rsample",
    )
)
_DROPS = frozenset(f"{kind}dropout{suffix}" for kind in ("", "alpha_", "feature_alpha_") for suffix in ("", "_")) | {
    f"dropout{dims}d" for dims in (1, 2, 3)
}
# From a forward to what it calls: a method, which calls a function, which calls another.
_NUM_LEVELS = 4
# By class: of a model's modules, most share theirs with others.
_NAMES: WeakKeyDictionary[type[nn.Module], frozenset[str]] = WeakKeyDictionary()


def is_rate(name: str, value: Any) -> bool:
    """Whether a module's attribute is a probability of dropout, by its name."""
    return type(value) in (int, float) and (name == "p" or any(part in name for part in ("drop", "rate", "prob")))


class ConditionalDraws(NamedTuple):
    """The parts of a model whose code may draw in a later forward, though it did not in an earlier one of its mode.

    Attributes:
        units: names of units.
        in_containers: whether the code around units may.
    """

    units: Collection[str] = frozenset()
    in_containers: bool = False

    @classmethod
    def of(cls, model: nn.Module, units: Collection[str]) -> "ConditionalDraws":
        """Those of a model with these units."""
        inside = {module for name in units for module in walk.modules(walk.submodule(model, name))}
        around = [module for module in walk.modules(model) if module not in inside]
        found = [name for name in units if any(map(may_draw, walk.modules(walk.submodule(model, name))))]
        return cls(frozenset(found), any(map(may_draw, around)))


def may_draw(module: nn.Module) -> bool:
    """Whether a module's forward calls functions that draw, by name.

    Dropout counts only where neither the module nor one right in it holds a rate: rates are part of the mode. What
    torch's modules draw depends on rates and training flags alone. Names of what the module holds are not functions.
    """
    kind = type(module)
    if _is_torchs(kind.__module__):
        return False
    names = _drawing_names_called_by(kind)
    if not names:  # most
        return False
    holders = [module, *module.children()]
    if any(is_rate(*held) for holder in holders for held in vars(holder).items()):
        names &= _DRAWS
    return any(not (name in children_of(module) or name in vars(module) or hasattr(kind, name)) for name in names)


def asks_for_mode(module: nn.Module) -> bool:
    """Whether a module's forward may do something else in training than in evaluation, by the names in its code.

    Its children count by themselves, and torch's own modules are known not to.
    """
    kind = type(module)
    return not _is_torchs(kind.__module__) and any("training" in names_in(one.__code__) for one in _functions_of(kind))


def _drawing_names_called_by(kind: type[nn.Module]) -> frozenset[str]:
    if kind not in _NAMES:
        called = frozenset().union(*(names_in(function.__code__) for function in _functions_of(kind)))
        _NAMES[kind] = called & (_DRAWS | _DROPS)
    return _NAMES[kind]


def _functions_of(kind: type[nn.Module]) -> Iterator[FunctionType]:
    """The forward of a class, and functions that it calls by name."""
    seen: set[FunctionType] = set()
    level = [_function(inspect.getattr_static(kind, "forward", None))]
    for _ in range(_NUM_LEVELS):
        new = {one for one in level if one is not None and one not in seen and not _is_torchs(one.__module__)}
        yield from new
        seen |= new
        level = [called for one in new for called in _called_by(one, kind)]


def _called_by(function: FunctionType, kind: type[nn.Module]) -> Iterator[FunctionType | None]:
    for name in names_in(function.__code__):
        yield _function(inspect.getattr_static(kind, name, None))
        yield _function(function.__globals__.get(name))
    for cell in function.__closure__ or ():
        try:
            yield _function(cell.cell_contents)
        except ValueError:
            continue  # it is filled later


def _function(found: Any) -> FunctionType | None:
    found = inspect.unwrap(found) if callable(found) else found
    return found if isinstance(found, FunctionType) else None


def _is_torchs(module: str | None) -> bool:
    return (module or "").partition(".")[0] == "torch"
