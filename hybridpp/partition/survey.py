"""Find the blocks of a model among the modules that its forward really runs."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from hybridpp.errors import HybridppError
from hybridpp.partition.blocks import Anatomy, dissect
from hybridpp.partition.calls import Trace
from hybridpp.partition.intercept import Interceptor
from hybridpp.partition.plan import uses
from hybridpp.partition.trace import Tracer

Sample = tuple[tuple[Any, ...], dict[str, Any]]


@dataclass(frozen=True, kw_only=True)
class Survey:
    """A model's blocks, and what was needed to find them.

    Attributes:
        anatomy: the blocks and units.
        interceptor: of the units.
        tracer: of the units.
        trace: of the sample.
    """

    anatomy: Anatomy
    interceptor: Interceptor
    tracer: Tracer
    trace: Trace


def survey(
    model: nn.Module,
    num_stages: int,
    sample: Sample,
    finest: Interceptor,
    *,
    named: Sequence[str] = (),
    device: torch.device,
    dtypes: Mapping[int, torch.dtype] | None = None,
    count_flops: bool = False,
) -> Survey:
    """Dissect and trace ``model``, again where a large part of it turns out to be one that the forward does not use.

    A tower that never runs for such samples (a decoder of images, in a model that reads them) may hold lists next to
    which all others look small. Most models are traced once.

    Args:
        model: whole.
        num_stages: into which it is to be cut.
        sample: positional and keyword arguments, real tensors.
        finest: of its finest units; made before, so that its routes are the inner ones.
        named: modules that the user wants to be blocks.
        device: where the trace pretends to run.
        dtypes: of tensors that will be cast, by ``id``.
        count_flops: whether the trace counts them.
    """
    used: set[str] | None = None
    anatomy = dissect(model, num_stages, named)
    while True:
        # Around the routes of an earlier round, which stay and let everything through.
        interceptor = Interceptor(model, anatomy.units)
        tracer = Tracer(model, interceptor, finest, device, dtypes)
        trace = tracer.trace(*sample, count_flops=count_flops)
        # A whole tower counts as used, so a finer round may find less; never more, or the rounds might not end.
        now = _used(trace)
        used = now if used is None else used & now
        again = dissect(model, num_stages, named, used)
        if again.units == anatomy.units:
            return Survey(anatomy=again, interceptor=interceptor, tracer=tracer, trace=trace)
        anatomy = again


def survey_samples(
    model: nn.Module,
    num_stages: int,
    samples: Sequence[Sample],
    prepare: Callable[[tuple[Any, ...], dict[str, Any]], Sample],
    finest: Interceptor,
    **how: Any,
) -> tuple[Sample, Survey]:
    """The first sample that the forward runs on, as ``prepare`` gives it, and what :func:`survey` finds with it."""
    *others, last = samples
    for sample in others:
        try:
            prepared = prepare(*sample)
            return prepared, survey(model, num_stages, prepared, finest, **how)
        except HybridppError:
            raise
        except Exception:  # whatever a model's forward raises
            continue
    prepared = prepare(*last)
    return prepared, survey(model, num_stages, prepared, finest, **how)


def _used(trace: Trace) -> set[str]:
    if not trace.calls:
        return {source for source in trace.result_sources if isinstance(source, str)}
    return set(uses(trace, (0,) * len(trace.calls)))
