"""Traces of models for tests, and what each of their calls depends on."""

import torch

from hybridpp.module_adapter import AdapterLayer, ModuleAdapter
from hybridpp.partition import Tracer, find_units
from hybridpp.partition.blocks import finest_units
from hybridpp.partition.intercept import Interceptor

CPU = torch.device("cpu")


def tracer(model, dtype=None):
    dtypes = {} if dtype is None else {id(tensor): dtype for tensor in model.parameters()}
    finest = Interceptor(ModuleAdapter(model), AdapterLayer.UNIT_RNG, finest_units(model))
    return Tracer(
        model, Interceptor(ModuleAdapter(model), AdapterLayer.STAGE, find_units(model, 2).units), finest, CPU, dtypes
    )


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
