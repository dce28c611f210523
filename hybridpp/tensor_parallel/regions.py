"""What a division says beyond the styles of layers, applied to the modules of a model."""

import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch.utils import _pytree as pytree

from hybridpp.errors import ConfigError
from hybridpp.tensor_parallel.arguments import use_parts
from hybridpp.tensor_parallel.collectives import sum_over_ranks
from hybridpp.tensor_parallel.crossings import Crossings
from hybridpp.tensor_parallel.division import Division, Part
from hybridpp.tensor_parallel.joined import run_on_whole
from hybridpp.tensor_parallel.layers import ColumnParallel, RowParallel, ShardedLayer
from hybridpp.tensor_parallel.linear import layer_of
from hybridpp.tensor_parallel.narrowed import run_narrowed
from hybridpp.tensor_parallel.placement import Placement


class FedColumnParallel(ColumnParallel):
    """A column layer that reads what was copied to the ranks where it was made, because others use parts of it too."""

    def enter(self, x: Tensor) -> Tensor:
        return x


class Region:
    """A module that computes on parts inside (all experts): from whole inputs, the sum of what the ranks make.

    Only the instance attribute ``forward`` is set. Collective: one all-reduce per input in the backward pass, one per
    output in the forward pass.

    Args:
        module: with this rank's parts.
        first_only: names of its parameters that only the first rank may add; their gradients are to be summed.
        crossings: of the model.
    """

    def __init__(self, module: nn.Module, first_only: tuple[str, ...], crossings: Crossings):
        self._module, self._first_only, self._crossings = module, first_only, crossings
        # functools.partial and no closure, so that the model can still be copied.
        module.forward = functools.partial(self._run, module.forward)

    def _run(self, forward: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        crossings = self._crossings
        args, kwargs = pytree.tree_map_only(Tensor, crossings.copy, (args, kwargs))
        first = next((leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)), None)
        if first is not None:
            crossings.enter(first)
        with self._adding_once():
            output = forward(*args, **kwargs)
        crossings.leave()
        return pytree.tree_map_only(Tensor, lambda own: sum_over_ranks(own.clone(), crossings.group), output)

    @contextmanager
    def _adding_once(self) -> Iterator[None]:
        parameters: Any = self._module._parameters
        if self._crossings.group.rank == 0:
            yield
            return
        before = {key: parameters[key] for key in self._first_only}
        parameters.update({key: parameter * 0 for key, parameter in before.items()})
        try:
            yield
        finally:
            parameters.update(before)


def place_parts(
    model: nn.Module, parts: Mapping[str, Part], names: Mapping[int, str], size: int, known: Mapping[int, Placement]
) -> dict[int, Placement]:
    """Placements of the parameters that ``parts`` divides, by their ``id``.

    Args:
        model: whole.
        parts: by the parameter's name.
        names: of the model's parameters, by ``id``.
        size: ranks to divide over.
        known: placements by the parameter's ``id`` that are settled.

    Raises:
        ConfigError: a parameter that several modules share would be divided in two ways.
    """
    placements = dict(known)
    for name, part in parts.items():
        parameter = model.get_parameter(name)
        placement = Placement(
            name=names[id(parameter)],
            full_shape=tuple(parameter.shape),
            dim=part.dim,
            size=size,
            parts=part.widths,
            copies=part.copies if any(number > 1 for number in part.copies) else (),
        )
        if placements.setdefault(id(parameter), placement) != placement:
            raise ConfigError(
                f"{placement.name!r} is shared by several modules that tensor parallelism would divide in two ways, "
                f"one of them as {name!r}. Name the layers to divide in tensor_parallel_plan."
            )
    return placements


def holders(rest: Division) -> frozenset[str]:
    """Names of the modules that hold divided parameters."""
    return frozenset(name.rpartition(".")[0] for name in rest.parts)


def added_once(model: nn.Module, rest: Division) -> set[str]:
    """Parameters that are added on one rank only, so that their gradients are sums over the ranks."""
    return {name for name in rest.first_only if layer_of(model.get_submodule(name.rpartition(".")[0])) is None}


def apply_rest(model: nn.Module, rest: Division, crossings: Crossings) -> dict[nn.Module, ShardedLayer]:
    """Let modules with divided parameters be given, and give, what the whole model expects; returns its layers."""
    layers: dict[nn.Module, ShardedLayer] = {}
    for name in sorted(holders(rest)):
        module = model.get_submodule(name)
        if layer_of(module) is not None:
            kind = RowParallel if name in rest.sums else ColumnParallel if name in rest.enters else FedColumnParallel
            layers[module] = kind(module, crossings)
        elif name in rest.sums:
            once = tuple(sorted(key for key in module._parameters if _join(name, key) in rest.first_only))
            Region(module, once, crossings)
    for name in sorted(rest.spreads):
        model.get_submodule(name).register_forward_hook(functools.partial(_spread, crossings))
    for name in sorted({name for name, _ in (*rest.arguments, *rest.results)}):
        arguments, results = (
            {number: part for (owner, number), part in parts.items() if owner == name}
            for parts in (rest.arguments, rest.results)
        )
        use_parts(model.get_submodule(name), arguments, results, crossings)
    for name, part in rest.joins.items():
        run_on_whole(model.get_submodule(name), part, crossings)
    for name, widths in rest.narrow_modules().items():
        run_narrowed(model.get_submodule(name), widths, crossings.group.size)
    return layers


def _join(name: str, key: str) -> str:
    return f"{name}.{key}" if name else key


def _spread(crossings: Crossings, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
    return pytree.tree_map_only(Tensor, crossings.copy, output)
