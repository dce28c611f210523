"""Refuse criteria with weights of their own that train, and those that read weights which a rank has in part.

Of the former each replica, and the last stage alone, would train a copy.
"""

import dis
import functools
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from types import FunctionType, MethodType
from typing import Any

from torch import Tensor, nn

from hybridpp.config import Precision
from hybridpp.errors import ConfigError
from hybridpp.nn.torch_private import DisableTorchFunctionSubclass, parameters_of
from hybridpp.partition.containers import tensors_in
from hybridpp.tensor_parallel import sharding_of
from hybridpp_plugins.engine_handle import ENGINE
from hybridpp_plugins.layout import Layout
from hybridpp_plugins.weights_in_loss import WeightsInLoss

_MOST_LEVELS = 4
_CONTAINERS = (list, tuple, dict)


class CriterionWeights:
    """Checks the criteria that a model is trained with.

    Args:
        model: that is boosted, before it is cut.
        layout: the ranks.
        precision: of the plugin.
        shards_weights: whether replicas divide them (ZeRO 3).

    Attributes:
        known: the criterion that was checked last.
        is_unread: whether it is not known which of the model's weights that one reads.
    """

    def __init__(self, model: nn.Module, layout: Layout, precision: Precision, *, shards_weights: bool = False):
        self._shards_weights = shards_weights
        self._model, self._grid, self._precision = model, layout.grid, precision
        self._names = frozenset(id(parameter) for parameter in model.parameters())
        # On one rank, without a loss scale, the script's own optimizer may train them.
        self._matters = layout.world.size > 1 or precision is Precision.FP16
        self.known: Any = None
        self.is_unread = False
        self._code: Any = None

    def check(self, criterion: Any) -> None:
        """Refuse a criterion that has trainable weights which are not the model's. Nothing is communicated.

        Args:
            criterion: a module, a function, a bound method or a partial of them; None: there is none.

        Raises:
            ConfigError: it has such weights; on every rank that has the same criterion.
        """
        # A function that is made anew in each step is the same.
        code = getattr(criterion, "__code__", criterion)
        if not self._matters or code is self._code:
            self.known = criterion
            return
        found = [item for item in trainable_in(criterion, self._model) if id(item[1]) not in self._names]
        if found:
            (name, tensor), grid = found[0], self._grid
            more = f" and {len(found) - 1} more" if len(found) > 1 else ""
            raise ConfigError(
                f"the criterion has trainable weights that are not the model's: {name!r} of shape "
                f"{tuple(tensor.shape)}{more}. They would be trained on the last stage alone, in each replica by "
                f"itself: got pp_size={grid.pp_size}, dp_size={grid.dp_size}, tp_size={grid.tp_size}, "
                f"precision={str(self._precision)!r}. Boost a module that holds the model and the criterion and whose "
                "forward returns the loss, with criterion=lambda outputs, inputs: outputs; or call "
                "requires_grad_(False) on weights that do not train."
            )
        self.known, self._code = criterion, code
        self.is_unread = self._grid.pp_size > 1 or self._grid.tp_size > 1 or self._shards_weights

    def reading(self, criterion: Callable[[Any, Any], Any], weights: WeightsInLoss | None) -> Callable[[Any, Any], Any]:
        """The criterion, which raises a ConfigError if its first loss depends on weights that are not whole here.

        Args:
            criterion: that is checked.
            weights: knows those that the model may not read alone; None: it may read all.
        """

        def call(outputs: Any, inputs: Any) -> Any:
            loss = criterion(outputs, inputs)
            if self.is_unread and isinstance(loss, Tensor):
                self.is_unread = False
                self._refuse_parts(weights_of_loss(loss, outputs))
                if weights is not None:
                    weights.check_parts(loss)
            return loss

        return call

    def _refuse_parts(self, read: Sequence[Tensor]) -> None:
        for name, parameter in self._model.named_parameters():
            if not any(parameter is one for one in read):
                continue
            if self._grid.pp_size > 1:
                which = f"the weights of its stage only: got pp_size={self._grid.pp_size}"
            elif sharding_of(parameter) is not None:
                which = f"a shard of it: got tp_size={self._grid.tp_size}"
            elif self._shards_weights:
                which = "no weights where no forward runs: got zero_stage=3"
            else:
                continue
            raise ConfigError(
                f"the criterion reads weights of the model ({name}), as a penalty does, and this rank has {which}. "
                "Let the model's forward return the penalty (its code finds all weights whole, and blocks of which it "
                "reads one are not sharded, unless a tensor_parallel_plan does that), use weight_decay of the "
                "optimizer, or use pp_size=1, tp_size=1 and zero_stage <= 2."
            )


def weights_of_loss(loss: Tensor, outputs: Any) -> list[Tensor]:
    """The leaves that a loss depends on by another way than through the model's outputs."""
    with DisableTorchFunctionSubclass():
        made = [leaf.grad_fn for leaf in tensors_in(outputs)]
        # What is behind the outputs, too: an output may be converted, or gathered, when the criterion reads it.
        of_model = _reached_from([node for node in made if node is not None], set())
        own = _reached_from([loss.grad_fn] if loss.grad_fn is not None else [], of_model)
    leaves = {edge for node in own for edge, _ in node.next_functions if hasattr(edge, "variable")}
    return [leaf.variable for leaf in leaves | {node for node in own if hasattr(node, "variable")}]


def _reached_from(nodes: list[Any], known: AbstractSet[Any]) -> set[Any]:
    found: set[Any] = set()
    while nodes:
        node = nodes.pop()
        if node not in found and node not in known:
            found.add(node)
            nodes += [edge for edge, _ in node.next_functions if edge is not None]
    return found


def trainable_in(criterion: Any, model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """The trainable weights that a criterion surely uses, each once, with a name.

    Those of modules that it is, or that are in its partial, its closure or the globals that it reads, or in the
    attributes that its method reads; not those of the model, or of another boosted one.
    """
    seen = {id(module) for module in model.modules()}
    yield from _trainable(criterion, "", _MOST_LEVELS, seen)


def _trainable(held: Any, name: str, levels: int, seen: set[int]) -> Iterator[tuple[str, Tensor]]:
    if id(held) in seen or levels < 0:
        return
    seen.add(id(held))
    if isinstance(held, Tensor):
        if held.requires_grad and held.is_leaf:
            yield name, held
    elif isinstance(held, nn.Module):
        yield from _of_module(held, name, seen)
    else:
        for key, value in _parts(held):
            yield from _trainable(value, f"{name}.{key}".strip("."), levels - 1, seen)


def _of_module(module: nn.Module, name: str, seen: set[int]) -> Iterator[tuple[str, Tensor]]:
    if ENGINE in vars(module):
        return
    for key, parameter in parameters_of(module).items():
        yield from _trainable(parameter, f"{name}.{key}".strip("."), 0, seen)
    for key, child in module.named_children():
        yield from _trainable(child, f"{name}.{key}".strip("."), 0, seen)


def _parts(held: Any) -> Iterator[tuple[str, Any]]:
    """What a function, a method, a partial, a container or a callable object reads, by name."""
    if isinstance(held, functools.partial):
        yield from (("", held.func), *((str(n), value) for n, value in enumerate(held.args)), *held.keywords.items())
    elif isinstance(held, MethodType):
        yield from _of_method(held.__self__, held.__func__)
    elif isinstance(held, FunctionType):
        yield from _of_function(held)
    elif isinstance(held, Mapping):
        yield from ((str(key), value) for key, value in held.items())
    elif isinstance(held, _CONTAINERS):
        yield from ((str(index), value) for index, value in enumerate(held))
    elif not isinstance(held, type) and isinstance(call := vars(type(held)).get("__call__"), FunctionType):
        yield from _of_method(held, call)


def _of_method(owner: Any, function: Any) -> Iterator[tuple[str, Any]]:
    """What a method reads, of its object only the attributes that its code names."""
    function = inspect.unwrap(function)
    if not isinstance(function, FunctionType):
        return
    named = set(function.__code__.co_names)
    own = vars(owner) if hasattr(owner, "__dict__") else {}
    if isinstance(owner, nn.Module):
        own = {**dict(owner.named_children()), **parameters_of(owner)}
    yield from ((key, value) for key, value in own.items() if key in named)
    yield from _of_function(function)


def _of_function(function: FunctionType) -> Iterator[tuple[str, Any]]:
    code = function.__code__
    for key, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
        try:
            yield key, cell.cell_contents
        except ValueError:  # it has no value yet
            continue
    # Not co_names, which has the names of attributes, too.
    read = {one.argval for one in dis.get_instructions(code) if one.opname == "LOAD_GLOBAL"}
    for key in sorted(read & function.__globals__.keys()):
        value = function.__globals__[key]
        if isinstance(value, nn.Module | Tensor | FunctionType | functools.partial):
            yield key, value
    wrapped = inspect.unwrap(function)
    if wrapped is not function:
        yield "", wrapped
