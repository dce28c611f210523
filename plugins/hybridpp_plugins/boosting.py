"""From the user's parts to an engine: cut, cast, re-point."""

from collections.abc import Callable
from contextlib import nullcontext
from typing import NamedTuple

import torch
from torch import nn

from hybridpp.checkpoint import allocate, derive_buffers, gather_objects
from hybridpp.cluster import get_dist_logger
from hybridpp.config import Precision
from hybridpp.partition import Parts, StagedModel, Staging, finest_units
from hybridpp.pipeline import Executor, Transport, call_arguments
from hybridpp.plugin import Boosted
from hybridpp.precision import (
    Formats,
    Fp32Losses,
    MasterWeights,
    cast,
    casts,
    dtype_of,
    keep_formats,
    module_formats,
    norms,
    working_dtype,
)
from hybridpp_plugins.before import Before, check_optimizer, check_same_weights
from hybridpp_plugins.engine import Engine
from hybridpp_plugins.examination import Examination
from hybridpp_plugins.layout import Layout
from hybridpp_plugins.own_calls import OwnCalls
from hybridpp_plugins.planning import Planner
from hybridpp_plugins.sample import NO_SAMPLES, Samples
from hybridpp_plugins.settings import Settings
from hybridpp_plugins.sharding import (
    Divided,
    divide_model,
)
from hybridpp_plugins.trainable import Trainable
from hybridpp_plugins.training import train
from hybridpp_plugins.unfilled import Unfilled


class _Working(NamedTuple):
    """What the model computes in: all but some modules of it, and its losses."""

    dtype: torch.dtype | None
    formats: Formats
    losses: Fp32Losses | None


class _LaidOut(NamedTuple):
    """A model on its ranks.

    Attributes:
        divided: its layers, over the ranks that share them.
        staged: its stages.
        working: what it computes in.
        masters: of its weights.
    """

    divided: Divided
    staged: StagedModel
    working: _Working
    masters: MasterWeights


def boost(
    parts: Boosted,
    settings: Settings,
    layout: Layout,
    planner: Planner,
    device: torch.device,
    find_samples: Callable[[], Samples],
    index: int,
) -> Engine:
    """Bring the parts into the layout, in place; ``index`` tells one job's models apart. Collective: all ranks."""
    model, optimizer = parts.model, parts.optimizer
    seed = torch.initial_seed() + index
    before = Before.of(model)
    formats = _formats(model, settings)
    if optimizer is not None:
        check_optimizer(optimizer, before.names)
    check_same_weights(model, seed, layout.control)
    divided, staged, working, masters = _lay_out(
        model, formats, settings, layout, planner, device, find_samples, before.unfilled
    )
    buckets, boosted = None, None
    if optimizer is not None:
        holders = {n: tuple(sorted({planner.placement[s] for s in stages})) for n, stages in staged.owners.items()}
        buckets, boosted = train(optimizer, before.names, model, holders, divided.summed, masters, settings, layout)
        boosted.unfilled = before.unfilled
        if working.losses:
            boosted.again = working.losses.again
        divided.weight_gradients.connect(buckets)
        if planner.splits_backward:
            get_dist_logger().info(divided.weight_gradients.report(), ranks=[0])
    transport = Transport(layout.activations, layout.gradients, device)
    executor = Executor(staged, transport, device, divided.weight_gradients, divided.in_a_step)
    examination = Examination(staged, executor, buckets, layout, device)
    if boosted is not None and settings.precision is Precision.FP16:
        boosted.own_calls = OwnCalls(device, lambda: boosted.scaling.may_search, examination.examine_calls)
        staged.around_call = boosted.own_calls.run
    return Engine(
        staged=staged,
        layout=layout,
        pipeline=settings.pipeline,
        planner=planner,
        device=device,
        seed=seed,
        executor=executor,
        examination=examination,
        optimizer=boosted,
        buckets=buckets,
        trainable=Trainable(buckets.parameters if buckets else {}),
        masters=masters,
        before=before,
        formats=formats,
    )


def _formats(model: nn.Module, settings: Settings) -> Formats:
    in_fp32 = norms(model) if settings.formats.fp32_norms else set()
    return module_formats(model, settings.formats.fp32_modules, dtype_of(settings.precision), in_fp32)


def _lay_out(
    model: nn.Module,
    formats: Formats,
    settings: Settings,
    layout: Layout,
    planner: Planner,
    device: torch.device,
    find_samples: Callable[[], Samples],
    unfilled: Unfilled,
) -> _LaidOut:
    """Divide the model, cut it, and bring what is this rank's to its device and into its formats."""
    half = dtype_of(settings.precision)
    derive_buffers(model)
    divided = divide_model(model, settings.parallel, layout, find_samples)
    keep_formats(model, formats, half)
    samples = find_samples() if len(planner.placement) > 1 else NO_SAMPLES
    losses = Fp32Losses(model, finest_units(model)) if half and settings.formats.fp32_losses else None
    working = _Working(working_dtype(model, settings.precision), formats, losses)
    staged = _cut(model, planner.placement, settings, layout, device, working, samples, divided.between_stages)
    masters = _place(model, settings.precision, working, device, unfilled)
    return _LaidOut(divided, staged, working, masters)


def _cut(
    model: nn.Module,
    placement: tuple[int, ...],
    settings: Settings,
    layout: Layout,
    device: torch.device,
    working: _Working,
    samples: Samples,
    parts: Parts | None,
) -> StagedModel:
    staging = Staging(
        compute_dtype=working.dtype,
        dtypes=casts(model, working.dtype, working.formats),
        partition=settings.partition,
        recomputation=settings.pipeline.recomputation,
        agree=lambda seconds: list(gather_objects(layout.control, seconds)[0]),
        again=working.losses.again if working.losses else nullcontext,
        parts=parts,
    )
    mine = [stage for stage, rank in enumerate(placement) if rank == layout.here.pp]
    calls = [call_arguments(batch) for batch in samples.batches]
    with samples.explained(model):
        return StagedModel(model, len(placement), mine, device=device, samples=calls, staging=staging)


def _place(
    model: nn.Module, precision: Precision, working: _Working, device: torch.device, unfilled: Unfilled
) -> MasterWeights:
    """Bring the model to its device and into its formats; the masters of its weights."""
    # As model.to, but leaves alone what has no numbers yet: it gets its memory last, in its final format.
    model._apply(lambda tensor: tensor if tensor.is_meta else tensor.to(device))  # type: ignore[no-untyped-call]  # torch
    masters = _masters(model, precision)
    cast(model, working.dtype, working.formats)
    unfilled.watch(model)
    allocate(model, masters.masters.values(), device)
    return masters


def _masters(model: nn.Module, precision: Precision) -> MasterWeights:
    """Of the trainable weights, before they are cast down; a frozen one needs none, and a frozen base may be large."""
    if precision is Precision.FP32:
        return MasterWeights({})
    return MasterWeights({name: p for name, p in model.named_parameters() if p.requires_grad and p.is_floating_point()})
