"""Traces of models for tests, and what each of their calls depends on."""

from collections import Counter

import torch

from hybridpp.cluster import CommonResults
from hybridpp.module_adapter import AdapterLayer, ModuleAdapter
from hybridpp.partition import Tracer, find_units
from hybridpp.partition.blocks import finest_units
from hybridpp.partition.common_traces import CommonTrace
from hybridpp.partition.intercept import Interceptor

CPU = torch.device("cpu")


def tracer(model, dtype=None, common=None):
    dtypes = {} if dtype is None else {id(tensor): dtype for tensor in model.parameters()}
    finest = Interceptor(ModuleAdapter(model), AdapterLayer.UNIT_RNG, finest_units(model))
    units = Interceptor(ModuleAdapter(model), AdapterLayer.STAGE, find_units(model, 2).units)
    return Tracer(model, units, finest, CPU, dtypes, common)


def trace(model, *args, count_flops=False, **kwargs):
    return tracer(model).trace(args, kwargs, count_flops=count_flops)


def links(found):
    """Each call as ``name < what its arguments stem from``."""
    names = [call.name for call in found.calls]

    def text(sources):
        labels = [source if isinstance(source, str) else f"{source.call}.{source.leaf}" for source in sources]
        return " ".join(sorted(labels))

    return [
        *(f"{n} < {text(call.sources)}" for n, call in zip(names, found.calls, strict=True)),
        text(found.result_sources),
    ]


def compare_traces(monkeypatch):
    """Let every rank trace for itself, and compare what it finds with the trace that it would have been given.

    Returns a counter of traces: ``"made"``, and ``"compared"``.
    """
    counts, get = Counter(), CommonResults.get

    def both(self, key, make, is_common, **options):
        made = make()
        given = get(self, key, lambda: made, is_common, **options)
        if not isinstance(made, CommonTrace):
            assert given == made, "a rank is given another result than its own"
            return made
        counts["made"] += 1
        if given is not made:
            counts["compared"] += 1
            assert given.trace == made.trace, "a rank is given a trace that is not its own"
            assert given[1:3] == made[1:3], "it leaves something else"
        return made

    monkeypatch.setattr(CommonResults, "get", both)
    return counts
