"""Check the user's tensor-parallel plan: run the model once, then try its blocks as the plan divides them."""

import pickle
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from hybridpp.cluster import Group, get_dist_logger, preserved_random_state
from hybridpp.errors import ConfigError
from hybridpp.nn import walk
from hybridpp.nn.torch_private import parameters_of, pytree
from hybridpp.nn.weight_reads import WeightReads
from hybridpp.partition import find_units
from hybridpp.pipeline import call_arguments
from hybridpp.plan_search import CheckedPlan, PlanFault, RunFormats, SampleRun, check_plan, recorded_ways
from hybridpp.sharding_plan import Plan, ShardingSpec, ShardKind
from hybridpp_plugins.common_plans import CommonPlans
from hybridpp_plugins.find_tp_plan import calls_of_blocks, of_first_rank
from hybridpp_plugins.sample import Samples


def checked_tp_plan(
    model: nn.Module,
    plan: Plan,
    find_samples: Callable[[], Samples],
    size: int,
    control: Group,
    common: CommonPlans | None = None,
    formats: RunFormats | None = None,
) -> Plan:
    """The user's plan, completed by the parameters whose gradients are sums over ranks.

    Rank 0 checks it for all ranks. Without a sample that the model runs on, only what the first forward shows is
    checked: a warning says so.

    Collective: all ranks; two all-gathers of host memory.

    Raises:
        ConfigError: with the plan, the model would compute something else; on every rank.
    """

    def find() -> tuple[CheckedPlan, dict[str, frozenset[int]]]:
        try:
            samples = find_samples()
        except ConfigError:
            return CheckedPlan(plan.spec, [], {"": "there is no sample of a batch"}), {}
        settings = "checked", size, pickle.dumps(plan.spec), formats and formats.described(model)
        return common.get(settings, model, samples, lambda: check(samples)) if common else check(samples)

    def check(samples: Samples) -> tuple[CheckedPlan, dict[str, frozenset[int]]]:
        blocks = find_units(model, 1).blocks
        read: list[str] = []
        readers = readers_of_parts(model, plan.spec, blocks)
        results: dict[str, Any] = {}
        with preserved_random_state(torch.device("cpu")):
            try:
                with (
                    WeightReads(model, readers, read.append).watched(),
                    _results(model, blocks, results),
                    recorded_ways(model, blocks) as ways,
                ):
                    calls, more, _ = calls_of_blocks(model, blocks, samples)
            except Exception as error:  # whatever a model raises
                why = f"it does not run on the sample ({type(error).__name__}: {error})"
                return CheckedPlan(plan.spec, [], {"": why}), {}
            if read:
                holder = read[0].rpartition(".")[0]
                why = f"has a part of {read[0]!r}, which code outside of it reads as if it were complete"
                return CheckedPlan(plan.spec, [PlanFault(holder, [holder], why, None)], {}), {}
            run = SampleRun(call_arguments(samples.batches[0]), calls, more, results)
            checked = check_plan(model, plan, blocks, run, size, formats)
        return checked, {name: taken for name, taken in ways.items() if name not in checked.unchecked}

    checked, ways = of_first_rank(find, control)
    if checked.faults:
        raise ConfigError(_refusal(model, plan, checked.faults, size))
    if checked.unchecked:
        name, why = next(iter(checked.unchecked.items()))
        get_dist_logger().warning(
            f"tensor_parallel_plan could not be tried on {name or type(model).__name__}: {why}. That its layers fit "
            "together is not known. Pass a sample that the model runs on to booster.boost.",
            ranks=[0],
        )
    return plan._replace(spec=checked.spec, ways=ways)


def readers_of_parts(
    model: nn.Module, spec: ShardingSpec, blocks: Collection[str], more: Collection[str] = ()
) -> dict[str, list[nn.Module]]:
    """The modules that may read weights of which a rank has a part, by the weight's name.

    They are the blocks, whose results are compared, and outside of these the modules that hold the weight.

    Args:
        model: that holds them.
        spec: how it is divided.
        blocks: names of its blocks.
        more: names of other weights whose gradients are sums over ranks.
    """
    owners: dict[int, list[nn.Module]] = {}
    for module in walk.modules(model):
        for parameter in parameters_of(module).values():
            if parameter is not None:
                owners.setdefault(id(parameter), []).append(module)
    holders = spec.holders()
    for name in blocks:
        if name not in holders:
            block = walk.submodule(model, name)
            for parameter in walk.parameters(block):
                owners[id(parameter)].append(block)
    parts = {id(model.get_parameter(name)) for name in (*spec.params, *spec.rank0_only, *spec.partial_grad, *more)}
    named = walk.named_parameters(model)
    return {name: owners[id(parameter)] for name, parameter in named if id(parameter) in parts}


def _refusal(model: nn.Module, plan: Plan, faults: Sequence[PlanFault], size: int) -> str:
    fault, more = faults[0], len(faults) - 1
    layers = ", ".join(_described(model, plan, name) for name in fault.layers)
    return (
        f"tensor_parallel_plan must not change what the model computes, and over tp_size={size} "
        f"{repr(fault.block) if fault.block else type(model).__name__} {fault.why}: with {layers}"
        f"{f'; so do {more} more' if more else ''}. {_advice(plan, fault)}"
    )


def _described(model: nn.Module, plan: Plan, name: str) -> str:
    if name not in plan.styles:  # of a module
        return f"{name!r} as {str(ShardKind.PARTIAL_GRAD)!r}"
    weight: Any = parameters_of(walk.submodule(model, name)).get("weight")
    shape = "" if weight is None else f" (weight {' x '.join(map(str, weight.shape))})"
    return f"{name!r}{shape} as {plan.styles[name]!r}"


def _advice(plan: Plan, fault: PlanFault) -> str:
    pairs = "The outputs of column layers go to row layers, through what computes each feature or head by itself."
    if fault.instead is None:
        return f"{pairs} Leave it out of tensor_parallel_plan, or leave out tensor_parallel_plan: then one is searched."
    styles, attributes = fault.instead.styles, fault.instead.spec.attributes
    own = {name: style for name, style in plan.styles.items() if f"{name}.".startswith(f"{fault.block}.")}
    if not styles:
        return "No way to divide its layers was found. Leave them out of tensor_parallel_plan."
    if all(_kind(styles.get(name, "")) == _kind(style) for name, style in own.items()) and attributes:
        too = ", ".join(f"{name}.{key} of {value}" for (name, key), value in attributes.items())
        return f"A rank also needs {too}. Leave out tensor_parallel_plan: then a plan is searched that sets it."
    return f"{pairs} This fits: {styles}. Or leave out tensor_parallel_plan: then one is searched."


def _kind(style: str) -> str:
    return style.partition(":")[0]


@contextmanager
def _results(model: nn.Module, blocks: Sequence[str], results: dict[str, Any]) -> Iterator[None]:
    """Inside, what each block returns first is noted."""

    def noting(name: str) -> Callable[[nn.Module, tuple[Any, ...], Any], None]:
        def note(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            results.setdefault(name, pytree.tree_map_only(Tensor, torch.Tensor.detach, output))

        return note

    hooks = [walk.submodule(model, name).register_forward_hook(noting(name)) for name in blocks]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
