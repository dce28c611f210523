"""Module lists of a model: modules whose children are blocks."""

from collections.abc import Collection

from torch import nn

from hybridpp.nn import walk
from hybridpp.nn.names import qualified

# These have no forward: container code calls what is in them.
NEVER_CALLED = (nn.ModuleList, nn.ModuleDict)


def num_parameters(module: nn.Module, idle: Collection[int]) -> int:
    return sum(parameter.numel() for parameter in walk.parameters(module) if id(parameter) not in idle)


def is_idle(module: nn.Module, idle: Collection[int]) -> bool:
    if not idle:
        return False
    held = [id(parameter) in idle for parameter in walk.parameters(module)]
    return bool(held) and all(held)


def outermost_lists(prefix: str, module: nn.Module) -> list[tuple[str, nn.Module]]:
    if is_list(module):
        return [(prefix, module)]
    return [
        found for name, child in module.named_children() for found in outermost_lists(qualified(prefix, name), child)
    ]


def is_list(module: nn.Module) -> bool:
    """Whether the children are blocks; those of a ModuleDict are, if they are of one class and no lists themselves."""
    if isinstance(module, nn.ModuleDict):
        kinds = {type(child) for child in module.children()}
        return len(module) > 1 and len(kinds) == 1 and not issubclass(kinds.pop(), (nn.Sequential, *NEVER_CALLED))
    return isinstance(module, nn.ModuleList | nn.Sequential) and len(module) > 0


def lists_of_blocks(prefix: str, module: nn.Module, share: float, idle: Collection[int] = ()) -> list[str]:
    """Names of the children of the large lists in (or at) ``module``; if a child is a list itself, of its children.

    Args:
        prefix: name of ``module``.
        module: where to look.
        share: of the largest list's parameters that a large list holds at least.
        idle: parameters that do not count, by ``id``; modules that hold only such parameters are left out.
    """
    lists = [(name, found) for name, found in outermost_lists(prefix, module) if not is_idle(found, idle)]
    sizes = [num_parameters(found, idle) for _, found in lists]
    children = [
        (qualified(name, child), part)
        for (name, found), size in zip(lists, sizes, strict=True)
        if size >= share * max(sizes)
        for child, part in found.named_children()
        if not is_idle(part, idle)
    ]
    return [
        name
        for child, part in children
        for name in (lists_of_blocks(child, part, share, idle) if isinstance(part, NEVER_CALLED) else [child])
    ]
