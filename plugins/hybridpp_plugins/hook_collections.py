"""What hooks inside of blocks collect: results of modules that are read beside the blocks' own."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from types import ModuleType
from typing import Any

from torch import Tensor, nn

from hybridpp.nn import walk
from hybridpp.nn.contents import attributes_of, has_attributes
from hybridpp.nn.torch_private import forward_hooks_of, pytree, storage_id
from hybridpp.partition import MODULE_INTERNALS, Reachable, is_users_hook

_CONTAINERS = (list, tuple, dict, deque)
_COLLECTIONS = (Tensor, ContextVar, *_CONTAINERS)
# A dict of lists of tensors, in an attribute of the hook's object.
_NUM_LEVELS = 4


@contextmanager
def watched_collections(model: nn.Module, blocks: Sequence[str]) -> Iterator[dict[str, set[tuple[str, int]]]]:
    """A context that records, by block, which results of modules inside the hooks on these modules collect.

    A result is a module's name in the block and a number among the leaves of what it returns.
    """
    collected: dict[str, set[tuple[str, int]]] = {}
    handles = []
    for name in blocks:
        block = walk.submodule(model, name)
        watch = _BlockWatch(collected.setdefault(name, set()))
        handles.append(block.register_forward_pre_hook(watch.begin))
        for inner, module in walk.named_modules(block):
            if inner:
                handles.append(module.register_forward_hook(partial(watch.note, inner)))
        handles.append(block.register_forward_hook(watch.end))
    try:
        yield collected
    finally:
        for handle in handles:
            handle.remove()


class _BlockWatch:
    """Notes what modules in a block return, and at its end what of that hooks have collected.

    Not before: a model may register its hooks in its first forward, after these.
    """

    def __init__(self, collected: set[tuple[str, int]]):
        self._collected = collected
        self._returned: list[tuple[str, list[Callable[..., Any]], list[Any]]] = []

    def begin(self, *_: Any) -> None:
        self._returned = []

    def note(self, inner: str, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        hooks = [hook for hook in forward_hooks_of(module).values() if is_users_hook(hook)]
        if hooks:
            self._returned.append((inner, hooks, pytree.tree_leaves(output)))

    def end(self, *_: Any) -> None:
        for inner, hooks, leaves in self._returned:
            kept = {storage_id(tensor) for tensor in collected_tensors(hooks)}
            found = (n for n, leaf in enumerate(leaves) if isinstance(leaf, Tensor) and storage_id(leaf) in kept)
            self._collected.update((inner, number) for number in found)
        self._returned = []


def collected_tensors(hooks: Iterable[Callable[..., Any]]) -> Iterator[Tensor]:
    """The tensors that hooks reach now, but for parameters and buffers of modules.

    They are in context variables, containers, and attributes of objects that the hooks refer to.
    """
    reached = (thing for thing in Reachable(hooks).objects if not isinstance(thing, type | ModuleType))
    pending = [(thing, _NUM_LEVELS) for thing in reached]
    seen: set[int] = set()
    while pending:
        thing, levels = pending.pop()
        if isinstance(thing, ContextVar):
            thing = thing.get(None)
        if id(thing) in seen or not levels:
            continue
        seen.add(id(thing))
        if isinstance(thing, Tensor):
            yield thing
        elif isinstance(thing, dict):
            pending += [(held, levels - 1) for held in thing.values()]
        elif isinstance(thing, _CONTAINERS):
            pending += [(held, levels - 1) for held in thing]
        elif levels == _NUM_LEVELS and has_attributes(thing):
            # What a module holds as one of torch's is no collection.
            is_module = isinstance(thing, nn.Module)
            held = attributes_of(thing).items()
            pending += [
                (value, levels - 1)
                for name, value in held
                if isinstance(value, _COLLECTIONS) and not (is_module and name in MODULE_INTERNALS)
            ]
