"""Find the repeated blocks of a model, between which it may be cut, and the units that run as a whole."""

from collections.abc import Collection, Sequence
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


def dissect(
    model: nn.Module, num_stages: int, named: Sequence[str] = (), used: Collection[str] | None = None
) -> Anatomy:
    """The blocks and units of ``model``, fine enough for ``num_stages`` stages where the model allows it.

    The blocks are the children of the model's big ``ModuleList``s and ``Sequential``s; where those are fewer than the
    stages, the largest block that holds such lists itself is replaced by its own blocks, again and again. A model
    without lists is cut between its children. Modules in ``named`` are blocks in any case.

    Args:
        model: nothing of it is run.
        num_stages: into which it is to be cut.
        named: names of modules that the user wants to be blocks.
        used: names of the parameters that the forward uses, where that is known (see ``survey.py``): how big a list is
            does not depend on the others, and a module whose parameters are all among the others is no block.

    Raises:
        PartitionError: the model has no module of a name in ``named``.
    """
    idle = set() if used is None else {id(held) for name, held in model.named_parameters() if name not in used}
    blocks = _blocks(model, _LIST_SHARE, idle)
    if named:
        for name in named:
            find_module(model, name)
        blocks = [block for block in blocks if not any(_related(block, name) for name in named)]
        order = {name: place for place, (name, _) in enumerate(model.named_modules())}
        blocks = sorted({*blocks, *named}, key=order.__getitem__)
    while not named and 1 < num_stages > len(blocks):
        finer = _split_largest(model, blocks, idle)
        if finer is None:
            break  # a forward may still call one block often enough
        blocks = finer
    return Anatomy(tuple(blocks), tuple(_units(model, blocks)))


def finest_units(model: nn.Module) -> tuple[str, ...]:
    """The units of the model cut as finely as it can be, whatever the number of stages and whatever its forward uses.

    Every unit that :func:`dissect` finds by itself is made of such units as a whole.
    """
    pending, finest = _blocks(model, 0.0), []
    while pending:
        inner = [(name, _lists_of_blocks(name, model.get_submodule(name), 0.0)) for name in pending]
        finest += [name for name, parts in inner if len(parts) < 2]
        pending = [part for _, parts in inner if len(parts) > 1 for part in parts]
    return tuple(_units(model, finest))


def _blocks(model: nn.Module, share: float, idle: Collection[int] = ()) -> list[str]:
    children = [name for name, child in model.named_children() if not _is_idle(child, idle)]
    return _lists_of_blocks("", model, share, idle) or children


def _related(one: str, other: str) -> bool:
    return f"{one}.".startswith(f"{other}.") or f"{other}.".startswith(f"{one}.")


def _num_parameters(module: nn.Module, idle: Collection[int]) -> int:
    return sum(parameter.numel() for parameter in module.parameters() if id(parameter) not in idle)


def _is_idle(module: nn.Module, idle: Collection[int]) -> bool:
    held = [id(parameter) in idle for parameter in module.parameters()]
    return bool(held) and all(held)


def _join(prefix: str, name: str) -> str:
    return f"{prefix}.{name}" if prefix else name


def _outermost_lists(prefix: str, module: nn.Module) -> list[tuple[str, nn.Module]]:
    if _is_list(module):
        return [(prefix, module)]
    return [found for name, child in module.named_children() for found in _outermost_lists(_join(prefix, name), child)]


def _is_list(module: nn.Module) -> bool:
    """Whether the children are blocks; those of a dict are where they are of one kind, and no lists themselves."""
    if isinstance(module, nn.ModuleDict):
        kinds = {type(child) for child in module.children()}
        return len(module) > 1 and len(kinds) == 1 and not issubclass(kinds.pop(), (nn.Sequential, *_NEVER_CALLED))
    return isinstance(module, nn.ModuleList | nn.Sequential) and len(module) > 0


def _lists_of_blocks(prefix: str, module: nn.Module, share: float, idle: Collection[int] = ()) -> list[str]:
    """Names of the children of the big lists below (or at) ``module``; where those are lists, of their children.

    Args:
        prefix: name of ``module``.
        module: where to look.
        share: of the largest list's parameters, which a list needs to be a big one.
        idle: parameters that do not count, by ``id``; what holds such only is left out.
    """
    lists = [(name, found) for name, found in _outermost_lists(prefix, module) if not _is_idle(found, idle)]
    sizes = [_num_parameters(found, idle) for _, found in lists]
    children = [
        (_join(name, child), part)
        for (name, found), size in zip(lists, sizes, strict=True)
        if size >= share * max(sizes)
        for child, part in found.named_children()
        if not _is_idle(part, idle)
    ]
    return [
        name
        for child, part in children
        for name in (_lists_of_blocks(child, part, share, idle) if isinstance(part, _NEVER_CALLED) else [child])
    ]


def _split_largest(model: nn.Module, blocks: list[str], idle: Collection[int]) -> list[str] | None:
    candidates = []
    for place, name in enumerate(blocks):
        block = model.get_submodule(name)
        inner = _lists_of_blocks(name, block, _LIST_SHARE, idle)
        if len(inner) > 1:
            candidates.append((_num_parameters(block, idle), -place, inner))
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
