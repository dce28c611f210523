"""Traces of models for tests, and what each of their calls depends on."""

import torch

from hybridpp.module_adapter import AdapterLayer, ModuleAdapter
from hybridpp.partition import SharedTraces, Tracer, find_units
from hybridpp.partition.blocks import finest_units
from hybridpp.partition.intercept import Interceptor

CPU = torch.device("cpu")


def tracer(model, dtype=None, shared=None):
    dtypes = {} if dtype is None else {id(tensor): dtype for tensor in model.parameters()}
    finest = Interceptor(ModuleAdapter(model), AdapterLayer.UNIT_RNG, finest_units(model))
    units = Interceptor(ModuleAdapter(model), AdapterLayer.STAGE, find_units(model, 2).units)
    return Tracer(model, units, finest, CPU, dtypes, shared)


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


class ComparedTraces(SharedTraces):
    """Lets every rank trace for itself, and compares what it finds with the trace that it would have been given.

    Attributes:
        num_compared: traces of all such objects.
    """

    num_compared = 0

    def find(self, forward):
        return None

    def keep(self, forward, trace):
        given = super().find(forward)
        if given is None:
            super().keep(forward, trace)
            return
        ComparedTraces.num_compared += 1
        assert given == trace, "a rank shares a trace that is not its own"
