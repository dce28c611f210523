"""Search for a way to shard the blocks of a model, verified by trials."""

from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from hybridpp.nn import walk
from hybridpp.nn.names import qualified
from hybridpp.nn.torch_private import parameters_of, pytree
from hybridpp.plan_search.block_run import ResultKey, SampleCall
from hybridpp.plan_search.block_search import BlockPlan, search_block_plan
from hybridpp.plan_search.hf_tp_plan import differences, hf_tp_plan
from hybridpp.plan_search.narrowed_block import NarrowCopies
from hybridpp.plan_search.run_formats import RunFormats
from hybridpp.sharding_plan.plan import Plan
from hybridpp.sharding_plan.sharding_spec import ShardingSpec
from hybridpp.sharding_plan.style_spec import styles_of_spec


def infer_plan(
    model: nn.Module,
    blocks: Iterable[str],
    sample_calls: Mapping[str, SampleCall],
    tp_size: int,
    more_calls: Mapping[str, Sequence[SampleCall | None]] | None = None,
    formats: RunFormats | None = None,
    collected: Mapping[str, Collection[ResultKey]] | None = None,
    smaller: Plan | None = None,
    copies: NarrowCopies | None = None,
) -> Plan:
    """How the blocks of a model can be sharded over ``tp_size`` ranks without a change of results.

    For each kind of block, one copy with random weights is sharded in every way that looks possible. The plan contains
    only layers with which the results and all gradients of the complete block are reproduced. The model is not changed.
    Its tensors must hold memory; the values of its weights do not matter.

    Args:
        model: with full parameters.
        blocks: names of the modules to shard.
        sample_calls: arguments of one call of each block; blocks without one stay replicated.
        tp_size: number of ranks.
        more_calls: other arguments that blocks get: in training or None, and of other samples.
        formats: in which the model will run, whose kernels must take the shards; None: not known.
        collected: by block, the results of modules inside that hooks collect (attention weights): they are complete on
            every rank, like the block's own.
        smaller: the plan for fewer ranks, of a number that divides ``tp_size``; what they cannot share is not tried
            again, since more ranks cannot, either. None: everything is tried.
        copies: of large blocks, that searches for other sizes made. None: each search makes its own.
    """
    copies = copies or NarrowCopies()
    formats_of = None if formats is None else formats.by_block(model)
    known: dict[Hashable, BlockPlan] = {}
    own_plan = hf_tp_plan(model)
    shared = None if smaller is None else smaller.spec.holders()
    reasons: dict[str, str] = {} if smaller is None else dict(smaller.reasons)
    plans: dict[str, BlockPlan] = {}
    for name in blocks:
        if name not in sample_calls:
            reasons[name] = "was not called"
            continue
        block = walk.submodule(model, name)
        own = own_plan.of_block(name)
        calls = calls_of(name, sample_calls, more_calls)
        in_run = formats_of(name) if formats_of else None
        inside = frozenset(collected.get(name, ())) if collected else frozenset()
        inner = (one.removeprefix(f"{name}.") for one in shared or () if one.startswith(f"{name}."))
        among = None if shared is None else frozenset(inner)
        kinds = tuple(call and kind_of(block, *call) for call in calls)
        kind = (kinds, tuple(sorted(own.items())), in_run, inside, among)
        if kind not in known:
            narrow = copies.of(kinds, block, calls, tp_size)
            known[kind] = search_block_plan(block, calls, tp_size, own, in_run, inside, among, narrow)
        plans[name] = known[kind]
    for name, parameter in shared_in_two_ways(model, plans).items():
        del plans[name]
        reasons[name] = f"{parameter!r} is shared with a module that is sharded in another way"
    spec = ShardingSpec()
    for name, plan in plans.items():
        reasons |= {qualified(name, inner): reason for inner, reason in plan.reasons.items()}
        spec |= plan.spec.inside(name)
    styles = styles_of_spec(model, spec, tp_size)
    return Plan(spec, styles, reasons, differences(own_plan, sample_calls, styles))


def shared_in_two_ways(model: nn.Module, plans: Mapping[str, BlockPlan]) -> dict[str, str]:
    """Blocks that share a module, or a parameter, with one that divides it in another way; with its name."""
    modules: dict[nn.Module, dict[str, ShardingSpec]] = {}
    parameters: dict[int, dict[str, Hashable]] = {}
    for name, inner, module in uses_of_modules(model, plans):
        spec = plans[name].spec if name else ShardingSpec()
        modules.setdefault(module, {})[name] = spec.of_module(inner, parameters_of(module))
        for key, parameter in parameters_of(module).items():
            if parameter is not None:
                parameters.setdefault(id(parameter), {}).setdefault(name, _way(spec, qualified(inner, key)))
    named: dict[Any, str] = {module: name for name, module in walk.named_modules(model)}
    named |= {id(parameter): name for name, parameter in walk.named_parameters(model)}
    ways_of: list[tuple[Any, Mapping[str, Any]]] = [*modules.items(), *parameters.items()]
    return {
        block: named[shared]
        for shared, ways in ways_of
        if any(way != next(iter(ways.values())) for way in ways.values())
        for block in ways
        if block
    }


def _way(spec: ShardingSpec, name: str) -> Hashable:
    if name in spec.rank0_only or name in spec.partial_grad:
        return "rank0_only" if name in spec.rank0_only else "partial_grad"
    return spec.params.get(name)


def uses_of_modules(model: nn.Module, blocks: Iterable[str]) -> Iterator[tuple[str, str, nn.Module]]:
    """Every module of a model: the block that holds it and its name there; empty where none of these holds it.

    A module that several blocks hold comes once for each of them. Whether code outside of blocks calls one that a block
    holds, a run shows, and not what is registered where.
    """
    inside: set[nn.Module] = set()
    for block in blocks:
        for inner, module in walk.named_modules(walk.submodule(model, block)):
            inside.add(module)
            yield block, inner, module
    for _, module in walk.named_modules(model):
        if module not in inside:
            yield "", "", module


def calls_of(
    name: str, calls: Mapping[str, SampleCall], more_calls: Mapping[str, Sequence[SampleCall | None]] | None
) -> list[SampleCall | None]:
    """The call of a block in evaluation, and those with other arguments."""
    return [calls[name], *((more_calls or {}).get(name, ()))]


def kind_of(block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Hashable:
    """What the plan of a block depends on: classes, sizes and settings of its modules, shapes of its arguments."""
    modules = tuple((name, type(module), _settings(module)) for name, module in walk.named_modules(block))
    sizes = tuple((name, parameter.shape) for name, parameter in walk.named_parameters(block))
    leaves, tree = pytree.tree_flatten((args, kwargs))
    shapes = tuple((leaf.shape, leaf.requires_grad) if isinstance(leaf, Tensor) else type(leaf) for leaf in leaves)
    return modules, sizes, shapes, str(tree)


def _settings(module: nn.Module) -> tuple[tuple[str, Any], ...]:
    return tuple(
        (key, value)
        for key, value in vars(module).items()
        if isinstance(value, bool | int | float | str) and not key.endswith(("idx", "index", "_id"))
    )
