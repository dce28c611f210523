"""Find the blocks of a model among the modules that its forward runs."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from hybridpp.errors import HybridppError
from hybridpp.module_adapter import AdapterLayer, ModuleAdapter
from hybridpp.nn import walk
from hybridpp.partition.blocks import ModuleUnits, find_units
from hybridpp.partition.calls import CallArguments, Trace
from hybridpp.partition.common_traces import CommonTraces
from hybridpp.partition.concrete_fallback import UntraceableUnitError
from hybridpp.partition.intercept import Interceptor
from hybridpp.partition.plan import uses
from hybridpp.partition.trace import Tracer

_T = TypeVar("_T")


@dataclass(frozen=True, kw_only=True)
class TracedUnits:
    """A model's units, and the trace that they were found with.

    Attributes:
        units: the blocks and units.
        interceptor: of the units.
        tracer: of the units.
        trace: of the sample.
    """

    units: ModuleUnits
    interceptor: Interceptor
    tracer: Tracer
    trace: Trace


def find_traced_units(
    adapter: ModuleAdapter,
    num_stages: int,
    sample: CallArguments,
    finest: Interceptor,
    *,
    named: Sequence[str] = (),
    device: torch.device,
    dtypes: Mapping[int, torch.dtype] | None = None,
    count_flops: bool = False,
    common: CommonTraces | None = None,
) -> TracedUnits:
    """Find the units of a model and trace it; repeat if the forward does not use a large part of it.

    A tower that does not run for the sample (an image decoder in a model that reads images) may hold the largest lists
    of modules, or a block may never be called although its children are. Most models are traced once.

    Args:
        adapter: of the complete model. Wrappers of an earlier round on the layer ``STAGE`` are taken off.
        num_stages: number of stages to cut it into.
        sample: positional and keyword arguments, real tensors.
        finest: interceptor of its finest units.
        named: modules that the user wants to be blocks.
        device: device of the fake tensors.
        dtypes: of tensors that will be cast, by ``id``.
        count_flops: whether the trace counts them.
        common: traces of the in-process ranks that hold equal models.
    """
    model = adapter.model
    used: set[str] | None = None
    uncalled: set[str] = set()
    units = find_units(model, num_stages, named)
    while True:
        adapter.take_off(AdapterLayer.STAGE)
        interceptor = Interceptor(adapter, AdapterLayer.STAGE, units.units)
        tracer = Tracer(model, interceptor, finest, device, dtypes, common)
        trace = tracer.trace(*sample, count_flops=count_flops)
        # A unit counts as used completely, so a finer round can find fewer used parameters, but no others.
        newly_used = _used(trace)
        used = newly_used if used is None else used & newly_used
        called = {name for call in trace.calls for name in (call.name, *call.others)}
        uncalled |= {name for name in units.blocks if name not in called}
        if uncalled or not used.issuperset(name for name, _ in walk.named_parameters(model)):
            refined = find_units(model, num_stages, named, used, uncalled)
        else:
            refined = units
        if refined.units == units.units:
            return TracedUnits(units=refined, interceptor=interceptor, tracer=tracer, trace=trace)
        units = refined


def first_traceable_sample(
    adapter: ModuleAdapter,
    num_stages: int,
    samples: Sequence[CallArguments],
    prepare: Callable[[tuple[Any, ...], dict[str, Any]], CallArguments],
    finest: Interceptor,
    **options: Any,
) -> tuple[CallArguments, TracedUnits]:
    """The first sample that the forward runs on, as ``prepare`` returns it, and its :func:`find_traced_units`."""

    def find(prepared: CallArguments) -> TracedUnits:
        return find_traced_units(adapter, num_stages, prepared, finest, **options)

    return first_that_runs(samples, prepare, find)


def first_that_runs(
    samples: Sequence[CallArguments],
    prepare: Callable[[tuple[Any, ...], dict[str, Any]], CallArguments],
    run: Callable[[CallArguments], _T],
) -> tuple[CallArguments, _T]:
    """The first sample that ``run`` accepts, as ``prepare`` returns it, and what ``run`` returns for it."""
    *others, last = samples
    for sample in others:
        try:
            prepared = prepare(*sample)
            return prepared, run(prepared)
        except Exception as error:  # whatever a model's forward raises
            if isinstance(error, HybridppError) and not isinstance(error, UntraceableUnitError):
                raise
    prepared = prepare(*last)
    return prepared, run(prepared)


def _used(trace: Trace) -> set[str]:
    if not trace.calls:
        return {source for source in trace.result_sources if isinstance(source, str)}
    return set(uses(trace, (0,) * len(trace.calls)))
