"""Find the repeated blocks of a model, between which it may be cut, and the units that run as a whole."""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn

from hybridpp.partition.marks import find_module

# A list of blocks holds at least this share of the parameters of the largest list; smaller ones (a head written as a
# Sequential, say) stay whole.
_LIST_SHARE = 0.1
# These have no forward: glue calls what is in them.
_NEVER_CALLED = (nn.ModuleList, nn.ModuleDict)


@dataclass(frozen=True)
class Anatomy:
    """The parts of a model, by module name.

    A *block* is where the model may be cut: after it. A *container* is an ancestor of a block; its forward is Python
    glue that every stage runs. A *unit* is a largest module that is no container: a block, an embedding, a norm, a
    head. Units are opaque.

    Attributes:
        blocks: names of the blocks, in registration order.
        units: names of the units, the blocks among them, in registration order.
    """

    blocks: tuple[str, ...]
    units: tuple[str, ...]


def dissect(model: nn.Module, num_stages: int, named: Sequence[str] = ()) -> Anatomy:
    """The blocks and units of ``model``, fine enough for ``num_stages`` stages where the model allows it.

    The blocks are the children of the model's big ``ModuleList``s and ``Sequential``s; where those are fewer than the
    stages, the largest block that holds such lists itself is replaced by its own blocks, again and again. A model
    without lists is cut between its children. Modules in ``named`` are blocks in any case.

    Raises:
        PartitionError: the model has no module of a name in ``named``.
    """
    blocks = _lists_of_blocks("", model) or [name for name, _ in model.named_children()]
    if named:
        for name in named:
            find_module(model, name)
        blocks = [block for block in blocks if not any(_related(block, name) for name in named)]
        order = {name: place for place, (name, _) in enumerate(model.named_modules())}
        blocks = sorted({*blocks, *named}, key=order.__getitem__)
    while not named and 1 < num_stages > len(blocks):
        finer = _split_largest(model, blocks)
        if finer is None:
            break  # a forward may still call one block often enough
        blocks = finer
    return Anatomy(tuple(blocks), tuple(_units(model, blocks)))


def finest_units(model: nn.Module) -> tuple[str, ...]:
    """The units of the model cut as finely as it can be, whatever number of stages it is cut into."""
    blocks = _lists_of_blocks("", model) or [name for name, _ in model.named_children()]
    pending, finest = blocks, []
    while pending:
        inner = [(name, _lists_of_blocks(name, model.get_submodule(name))) for name in pending]
        finest += [name for name, parts in inner if len(parts) < 2]
        pending = [part for _, parts in inner if len(parts) > 1 for part in parts]
    return tuple(_units(model, finest))


def _related(one: str, other: str) -> bool:
    return f"{one}.".startswith(f"{other}.") or f"{other}.".startswith(f"{one}.")


def _num_parameters(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def _join(prefix: str, name: str) -> str:
    return f"{prefix}.{name}" if prefix else name


def _outermost_lists(prefix: str, module: nn.Module) -> list[tuple[str, nn.Module]]:
    if isinstance(module, nn.ModuleList | nn.Sequential) and len(module) > 0:
        return [(prefix, module)]
    return [found for name, child in module.named_children() for found in _outermost_lists(_join(prefix, name), child)]


def _lists_of_blocks(prefix: str, module: nn.Module) -> list[str]:
    """Names of the children of the big lists below (or at) ``module``; where those are lists, of their children."""
    lists = [(name, found, _num_parameters(found)) for name, found in _outermost_lists(prefix, module)]
    largest = max((size for *_, size in lists), default=0)
    children = [
        (_join(name, child), part)
        for name, found, size in lists
        if size >= _LIST_SHARE * largest
        for child, part in found.named_children()
    ]
    return [
        name
        for child, part in children
        for name in (_lists_of_blocks(child, part) if isinstance(part, _NEVER_CALLED) else [child])
    ]


def _split_largest(model: nn.Module, blocks: list[str]) -> list[str] | None:
    candidates = []
    for place, name in enumerate(blocks):
        block = model.get_submodule(name)
        inner = _lists_of_blocks(name, block)
        if len(inner) > 1:
            candidates.append((_num_parameters(block), -place, inner))
    if not candidates:
        return None
    _, negative_place, inner = max(candidates)
    place = -negative_place
    return [*blocks[:place], *inner, *blocks[place + 1 :]]


def _units(model: nn.Module, blocks: list[str]) -> list[str]:
    """Largest modules that hold no block; a module registered twice counts under its first name."""
    containers = {""}
    for block in blocks:
        parts = block.split(".")
        containers.update(".".join(parts[:depth]) for depth in range(1, len(parts)))
    first_names = dict(model.named_modules())
    for name, module in first_names.items():
        if isinstance(module, _NEVER_CALLED) and name.rpartition(".")[0] in containers:
            containers.add(name)
    return [name for name in first_names if name and name not in containers and name.rpartition(".")[0] in containers]
