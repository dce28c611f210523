"""Split large blocks into their children until there are enough blocks for a cut."""

from collections import Counter
from collections.abc import Collection

from torch import nn

from hybridpp.nn import walk
from hybridpp.nn.names import qualified
from hybridpp.partition.compiled import is_compiled
from hybridpp.partition.module_lists import (
    NEVER_CALLED,
    is_idle,
    is_list,
    lists_of_blocks,
    num_parameters,
    outermost_lists,
)


def refined(
    model: nn.Module,
    num_stages: int | None,
    share: float,
    idle: Collection[int] = (),
    uncalled: Collection[str] = (),
) -> list[str]:
    """Names of blocks.

    Args:
        model: to be cut.
        num_stages: number of stages; None: the finest cut, for any number of stages.
        share: of the largest list, see :func:`lists_of_blocks`.
        idle: parameters that do not count, by ``id``.
        uncalled: names of modules that the forward never calls: their children are called instead.
    """
    blocks = _parts("", model, share, idle)
    blocks = [part for name in blocks for part in (name in uncalled and _opened(model, name, share, idle)) or [name]]
    if num_stages is None:
        finest: list[str] = []
        while blocks:
            inner = [(name, _opened(model, name, share, idle)) for name in blocks]
            finest += [name for name, parts in inner if len(parts) < 2]
            blocks = [part for _, parts in inner if len(parts) > 1 for part in parts]
        return finest
    total = num_parameters(model, idle)
    while True:
        finer = _split_largest(model, blocks, share, idle, total if len(blocks) >= num_stages else 0)
        if finer is None:
            return blocks  # a forward may still call one block often enough
        blocks = finer


def _split_largest(
    model: nn.Module, blocks: list[str], share: float, idle: Collection[int], total: int
) -> list[str] | None:
    """The blocks, with the largest one that can be split replaced by its parts; None: no block can or need be split.

    Args:
        model: of the blocks.
        blocks: their names.
        share: of the largest list.
        idle: parameters that do not count.
        total: number of the model's parameters, if there are enough blocks: then only a block is split that holds more
            than half of them and is not one of many of its kind; 0: there are too few blocks.
    """
    candidates = []
    for index, name in enumerate(blocks):
        size = num_parameters(walk.submodule(model, name), idle)
        if total and (2 * size <= total or not _is_apart(model, name)):
            continue
        inner = _opened(model, name, share, idle)
        if len(inner) > 1:
            candidates.append((size, -index, inner))
    if not candidates:
        return None
    _, negative_index, inner = max(candidates)
    index = -negative_index
    return [*blocks[:index], *inner, *blocks[index + 1 :]]


def _opened(model: nn.Module, name: str, share: float, idle: Collection[int]) -> list[str]:
    """The blocks that may replace a block: those in its lists, or its children if it is no member of a list."""
    if is_compiled(walk.submodule(model, name)):
        return []
    find = _parts if _is_apart(model, name) else lists_of_blocks
    return find(name, walk.submodule(model, name), share, idle)


def _is_apart(model: nn.Module, name: str) -> bool:
    """Whether a module is in no list, or in a chain of different modules (a backbone and a head) that is in none."""
    steps = name.split(".")
    lists = [
        (found, step)
        for depth, step in enumerate(steps)
        if is_list(found := walk.submodule(model, ".".join(steps[:depth])))
    ]
    if len(lists) != 1:
        return not lists
    around, step = lists[0]
    kinds = Counter(type(child) for child in around.children())
    return isinstance(around, nn.Sequential) and kinds[type(walk.submodule(around, step))] == 1


def _parts(prefix: str, module: nn.Module, share: float, idle: Collection[int]) -> list[str]:
    """The members of a module's big lists, where those hold most of its layers; else its children as well.

    A module that wraps a single module counts as that module.
    """
    listed = lists_of_blocks(prefix, module, share, idle)
    if listed and not _is_mostly_outside_of_lists(module):
        return listed
    children = [(qualified(prefix, n), child) for n, child in module.named_children() if not is_idle(child, idle)]
    holding = [(name, child) for name, child in children if walk.parameters(child)]
    inside = _parts(*holding[0], share, idle) if len(holding) == 1 else []
    if inside:
        return inside
    parts: list[str] = []
    for name, child in children:
        members = [member for member in listed if member.startswith(f"{name}.")]
        if members and is_list(child):
            parts += members
        elif members or isinstance(child, NEVER_CALLED):
            parts += _parts(name, child, share, idle)
        else:
            parts.append(name)
    return parts


def _is_mostly_outside_of_lists(module: nn.Module) -> bool:
    """Whether other layers than embeddings, and but for the largest one (a head), hold more than all lists do."""
    lists = [found for _, found in outermost_lists("", module)]
    members = {part for found in lists for part in walk.modules(found)}
    layers = [
        num_parameters(part, ())
        for part in walk.modules(module)
        if part not in members and not isinstance(part, nn.Embedding) and next(part.children(), None) is None
    ]
    return sum(layers) - max(layers, default=0) > sum(num_parameters(found, ()) for found in lists)
