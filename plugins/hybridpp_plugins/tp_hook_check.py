"""Refuse hooks inside of sharded blocks that collect tensors of which this rank has a part only."""

from collections.abc import Callable, Collection
from functools import partial
from typing import Any

from torch import Tensor, nn

from hybridpp.errors import ConfigError
from hybridpp.module_adapter import ModuleAdapter
from hybridpp.nn import walk
from hybridpp.nn.names import qualified
from hybridpp.nn.torch_private import forward_hooks_of, forward_pre_hooks_of, pytree, storage_id
from hybridpp.partition import is_users_hook
from hybridpp.plan_search import SequencePlan
from hybridpp.sharding_plan import ShardingSpec
from hybridpp_plugins.hook_collections import collected_tensors


def check_hooks_of_blocks(
    adapter: ModuleAdapter,
    blocks: Collection[str],
    spec: ShardingSpec,
    sequences: SequencePlan,
    partial_grad: Collection[str],
) -> None:
    """Check, in every forward, what hooks inside of sharded blocks collect; blocks without such hooks pay nothing.

    Args:
        adapter: of the model, with this rank's shards.
        blocks: names of its blocks that are not compiled.
        spec: how it is sharded.
        sequences: which blocks run on sequence shards.
        partial_grad: names of replicated parameters that see a part of the activations on each rank.
    """
    for name in blocks:
        own, block = spec.of_block(name), walk.submodule(adapter.model, name)
        if own == ShardingSpec() and name not in sequences.blocks:
            continue
        divided = {inner.rpartition(".")[0] for inner in own.params} | {*own.holders()}
        sums = {*own.reduce_outputs, *own.gather_outputs}
        partly = {inner for inner, _ in walk.named_parameters(block) if qualified(name, inner) in partial_grad}
        if name in sequences.blocks:
            divided |= {*sequences.blocks[name].replicated}
            sums = set()
        check = _BlockCheck(name, block, divided, sums, partly, {*own.results}, is_on_shards=name in sequences.blocks)
        adapter.hooked(block, "check of hooks", block.register_forward_pre_hook(check.begin, with_kwargs=True))
        adapter.hooked(block, "check of hooks", block.register_forward_hook(check.end, with_kwargs=True))


class _BlockCheck:
    """The check of one block.

    Args:
        name: of the block.
        block: with this rank's shards.
        divided: names of the modules inside that hold or return parts.
        sums: names of those whose first result is complete nevertheless.
        partly: the replicated parameters that see a part of the activations on each rank.
        gathered: results of modules inside that are gathered.
        is_on_shards: whether the block runs on sequence shards.
    """

    def __init__(
        self,
        name: str,
        block: nn.Module,
        divided: Collection[str],
        sums: Collection[str],
        partly: Collection[str],
        gathered: Collection[tuple[str, int]],
        *,
        is_on_shards: bool,
    ):
        self._name, self._is_on_shards = name, is_on_shards
        inside = [(inner, module) for inner, module in walk.named_modules(block) if inner]
        self._inside = [module for _, module in inside]
        self._hooks = [held for _, m in inside for held in (forward_pre_hooks_of(m), forward_hooks_of(m))]
        self._names = {module: inner for inner, module in inside}
        self._holds_parts = {module for inner, module in inside if _has_inside(inner, divided)}
        self._sums = {module for inner, module in inside if _has_inside(inner, sums)}
        self._is_complete = {
            module
            for inner, module in inside
            if module not in self._holds_parts and walk.parameters(module) and not _has_inside(inner, partly)
        }
        self._gathered = gathered
        self._before: list[Tensor] | None = None
        # By storage, as views of what is complete are so. The tensors are kept, so that no other gets their storage.
        self._complete: dict[int, Tensor] = {}
        self._own: list[Any] = []

    def begin(self, block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """A pre-hook of the block: notes what its hooks have collected before."""
        self._finish()
        hooks = self._present()
        if not hooks:
            return
        self._before = list(collected_tensors(hooks))
        if not self._is_on_shards:
            self._note(pytree.tree_leaves((args, kwargs)))
        for module in self._inside:
            # Before the hooks that collect, so that the results are those of the module.
            self._own.append(module.register_forward_hook(partial(_noting, self._note_result), prepend=True))

    def end(self, block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        """A hook of the block: refuses what its hooks have collected.

        Raises:
            ConfigError: a tensor among it is not complete.
        """
        if self._before is None:
            return
        # The block's own hooks may collect what goes in and out of it, which is complete.
        known = {id(tensor) for tensor in (*self._before, *pytree.tree_leaves((args, kwargs, output)))}
        try:
            for hook in self._present():
                for tensor in collected_tensors([hook]):
                    if id(tensor) not in known and _storage(tensor) not in self._complete:
                        raise ConfigError(self._refusal(hook, tensor))
        finally:
            self._finish()

    def _refusal(self, hook: Callable[..., Any], tensor: Tensor) -> str:
        owner = next(
            name
            for module, name in self._names.items()
            if hook in (*forward_pre_hooks_of(module).values(), *forward_hooks_of(module).values())
        )
        title = getattr(hook, "__qualname__", type(hook).__name__)
        kind = "positions of the sequence" if self._is_on_shards else "heads or features"
        return (
            f"hook {title!r} on module {qualified(self._name, owner)!r} collects a tensor of shape "
            f"{tuple(tensor.shape)} inside of a block that is sharded over tensor-parallel ranks, where each rank has "
            f"its own {kind} only: what is computed of it (output_attentions=True) would be wrong. Register the hook, "
            "or set what makes it collect, before boost, and leave tensor_parallel_plan out: a plan that is searched "
            "keeps complete what hooks collect on the sample. Or use tp_size=1, or a tensor_parallel_plan that leaves "
            "the layers of that module whole, or collect less."
        )

    def _finish(self) -> None:
        for handle in self._own:
            handle.remove()
        self._own, self._before, self._complete = [], None, {}

    def _note(self, leaves: list[Any]) -> None:
        self._complete |= {_storage(leaf): leaf for leaf in leaves if isinstance(leaf, Tensor)}

    def _note_result(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        leaves = pytree.tree_leaves(output)
        name = self._names[module]
        self._note([leaf for number, leaf in enumerate(leaves) if (name, number) in self._gathered])
        if module in self._sums:
            self._note(leaves[:1])
        elif module in self._is_complete or (module not in self._holds_parts and self._are_complete(args)):
            self._note(leaves)

    def _are_complete(self, args: tuple[Any, ...]) -> bool:
        given = [leaf for leaf in pytree.tree_leaves(args) if isinstance(leaf, Tensor)]
        return bool(given) and all(_storage(leaf) in self._complete for leaf in given)

    def _present(self) -> list[Callable[..., Any]]:
        """The user's hooks on modules inside."""
        return [hook for held in self._hooks if held for hook in held.values() if is_users_hook(hook)]


def _noting(
    note: Callable[[nn.Module, tuple[Any, ...], Any], None], module: nn.Module, args: tuple[Any, ...], output: Any
) -> None:
    note(module, args, output)


def _has_inside(name: str, parts: Collection[str]) -> bool:
    """Whether one of these modules or parameters is, or is in, a module."""
    return any(f"{part}.".startswith(f"{name}.") for part in parts)


def _storage(tensor: Tensor) -> int:
    return storage_id(tensor)
