"""Apply the part of a sharding spec that concerns modules other than linear layers and embeddings."""

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from hybridpp.module_adapter import AdapterLayer, ModuleAdapter
from hybridpp.nn.names import qualified
from hybridpp.nn.torch_private import parameters_of, pytree
from hybridpp.sharded_activations.collectives import sum_over_ranks
from hybridpp.sharding_plan.sharding_spec import ShardingSpec
from hybridpp.tensor_parallel.gathered_modules import run_on_gathered
from hybridpp.tensor_parallel.local_width import run_on_local_width
from hybridpp.tensor_parallel.sharded_arguments import shard_arguments
from hybridpp.tensor_parallel.tp_context import TensorParallelContext


class ReduceOutputsRegion:
    """A module that computes with shards (all experts of a layer): replicated inputs, all-reduced outputs.

    Collective: one all-reduce per input in the backward pass, one per output in the forward pass.

    Args:
        module: with this rank's shards.
        rank0_only: its parameters of which other ranks than 0 use zeros.
        context: of the model.
    """

    def __init__(self, module: nn.Module, rank0_only: tuple[str, ...], context: TensorParallelContext):
        self._module, self._rank0_only, self._context = module, rank0_only, context

    def run(self, forward: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """The module around its own forward."""
        context = self._context
        args, kwargs = pytree.tree_map_only(Tensor, context.copy_to_tp_region, (args, kwargs))
        first = next((leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)), None)
        if first is not None:
            context.fork_rng(first)
        with self._zeros_except_on_rank_0():
            output = forward(*args, **kwargs)
        context.restore_rng()
        return pytree.tree_map_only(Tensor, lambda local: sum_over_ranks(local.clone(), context.group), output)

    @contextmanager
    def _zeros_except_on_rank_0(self) -> Iterator[None]:
        parameters: Any = parameters_of(self._module)
        if self._context.group.rank == 0:
            yield
            return
        before = {key: parameters[key] for key in self._rank0_only}
        parameters.update({key: parameter * 0 for key, parameter in before.items()})
        try:
            yield
        finally:
            parameters.update(before)


def apply_to_regions(
    adapter: ModuleAdapter, spec: ShardingSpec, regions: list[str], context: TensorParallelContext
) -> None:
    """Wrap the modules that are no sharded layers themselves but are named by ``spec``.

    Args:
        adapter: of the model, with this rank's shards.
        spec: of the model.
        regions: the modules that hold shards and are no sharded layers.
        context: of the model.
    """
    model = adapter.model
    for name in regions:
        if name in spec.reduce_outputs:
            module = model.get_submodule(name)
            rank0_only = tuple(sorted(key for key in parameters_of(module) if qualified(name, key) in spec.rank0_only))
            adapter.wrap(module, AdapterLayer.SHARD, ReduceOutputsRegion(module, rank0_only, context).run)
    for name in sorted(spec.copy_outputs):
        module = model.get_submodule(name)
        handle = module.register_forward_hook(functools.partial(_copy_outputs, context))
        adapter.hooked(module, "hook that copies its outputs to the ranks", handle)
    for name in sorted({name for name, _ in (*spec.arguments, *spec.results)}):
        arguments, results = (
            {number: shard for (owner, number), shard in shards.items() if owner == name}
            for shards in (spec.arguments, spec.results)
        )
        shard_arguments(adapter, model.get_submodule(name), arguments, results, context)
    for name, shard in spec.gather_inputs.items():
        run_on_gathered(adapter, model.get_submodule(name), shard, context)
    for name in sorted({name for name, _ in spec.local_width_args}):
        widths = {number: width for (owner, number), width in spec.local_width_args.items() if owner == name}
        run_on_local_width(adapter, model.get_submodule(name), widths, context.group.size)


def _copy_outputs(context: TensorParallelContext, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
    return pytree.tree_map_only(Tensor, context.copy_to_tp_region, output)
