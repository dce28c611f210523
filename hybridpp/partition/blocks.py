"""Find the repeated blocks of a model, between which it may be cut, and its units, which are never cut."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from torch import nn

from hybridpp.nn import walk
from hybridpp.partition.annotations import find_module
from hybridpp.partition.module_lists import NEVER_CALLED, is_idle, lists_of_blocks
from hybridpp.partition.refine import refined

# A list of blocks holds at least this share of the parameters of the largest list; smaller ones (such as a head that is
# a Sequential) are not split.
_LIST_SHARE = 0.1


@dataclass(frozen=True)
class ModuleUnits:
    """The units of a model, by module name.

    A *block* is where the model may be cut: after it. A *container* is an ancestor of a block; its forward is Python
    container code that every stage runs. A *unit* is a largest module that is no container: a block, an embedding, a
    norm, a head. Units are opaque.

    Attributes:
        blocks: names of the blocks, in registration order.
        units: names of the units, the blocks among them, in registration order.
    """

    blocks: tuple[str, ...]
    units: tuple[str, ...]


def find_units(
    model: nn.Module,
    num_stages: int,
    named: Sequence[str] = (),
    used: Collection[str] | None = None,
    uncalled: Collection[str] = (),
) -> ModuleUnits:
    """The blocks and units of ``model``, fine enough for ``num_stages`` stages where the model allows it.

    The blocks are the children of the model's big ``ModuleList``s and ``Sequential``s; where those are fewer than the
    stages, the largest block that holds such lists itself is replaced by its own blocks, again and again. A model
    without lists, or with most of its layers outside of them, is cut between its children, and a child that holds more
    than half of all between its own. Modules in ``named`` are blocks in any case.

    Args:
        model: it is not run.
        num_stages: number of stages to cut it into.
        named: names of modules that the user wants to be blocks.
        used: names of the parameters that the forward uses, if known (see ``traced_units.py``): the others do not count
            for the size of a list, and a module that holds only others is no block.
        uncalled: names of modules that the forward was seen not to call, though it uses what they hold.

    Raises:
        PartitionError: the model has no module of a name in ``named``.
    """
    idle = set() if used is None else {id(held) for name, held in walk.named_parameters(model) if name not in used}
    blocks = _blocks(model, _LIST_SHARE, idle)
    if named:
        for name in named:
            find_module(model, name)
        blocks = [block for block in blocks if not any(_related(block, name) for name in named)]
        order = {name: index for index, (name, _) in enumerate(walk.named_modules(model))}
        blocks = sorted({*blocks, *named}, key=order.__getitem__)
    elif num_stages > 1:
        blocks = refined(model, num_stages, _LIST_SHARE, idle, uncalled)
    return ModuleUnits(tuple(blocks), tuple(_units(model, blocks)))


def finest_units(model: nn.Module) -> tuple[str, ...]:
    """The units of the finest possible cut of the model, independent of the number of stages and of what its forward
    uses.

    Every unit that :func:`find_units` finds without ``named`` consists of complete such units.
    """
    return tuple(_units(model, refined(model, None, 0.0)))


def _blocks(model: nn.Module, share: float, idle: Collection[int] = ()) -> list[str]:
    children = [name for name, child in model.named_children() if not is_idle(child, idle)]
    return lists_of_blocks("", model, share, idle) or children


def _related(first: str, second: str) -> bool:
    return f"{first}.".startswith(f"{second}.") or f"{second}.".startswith(f"{first}.")


def _units(model: nn.Module, blocks: list[str]) -> list[str]:
    """The largest modules that contain no block; a module that is registered twice has its first name."""
    containers = {""}
    for block in blocks:
        parts = block.split(".")
        containers.update(".".join(parts[:depth]) for depth in range(1, len(parts)))
    first_names = dict(walk.named_modules(model))
    for name, module in first_names.items():
        if isinstance(module, NEVER_CALLED) and name.rpartition(".")[0] in containers:
            containers.add(name)
    return [name for name in first_names if name and name not in containers and name.rpartition(".")[0] in containers]
