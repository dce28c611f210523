"""From the user's parts to an engine: cut, cast, re-point."""

import zlib
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from hybridpp.checkpoint import allocate, derive_buffers, gather_objects
from hybridpp.cluster import get_dist_logger
from hybridpp.config import Precision
from hybridpp.data_parallel import GradientBuckets
from hybridpp.errors import ConfigError
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
from hybridpp_plugins.agreed_norm import AgreedNorm
from hybridpp_plugins.engine import Engine
from hybridpp_plugins.examination import Examination
from hybridpp_plugins.layout import Layout
from hybridpp_plugins.optimizer import HybridOptimizer
from hybridpp_plugins.own_calls import OwnCalls
from hybridpp_plugins.planning import Planner
from hybridpp_plugins.sample import NO_SAMPLES, Samples
from hybridpp_plugins.settings import Settings
from hybridpp_plugins.sharding import (
    Divided,
    counts_here,
    divide_model,
    own_state,
    placements,
    share_copies,
)
from hybridpp_plugins.trainable import Trainable
from hybridpp_plugins.unfilled import Unfilled


class _Before(NamedTuple):
    """What a model was before anything was done to it.

    Attributes:
        names: of the parameters, by ``id``; the first one where there are several.
        aliases: the others, each with the first.
        dtypes: of everything in the state.
        model_dtype: of the first floating-point parameter.
        unfilled: what has no numbers yet.
        buffer_names: persistent buffers.
    """

    names: dict[int, str]
    aliases: dict[str, str]
    dtypes: dict[str, torch.dtype]
    model_dtype: torch.dtype | None
    unfilled: Unfilled
    buffer_names: frozenset[str]

    @classmethod
    def of(cls, model: nn.Module) -> "_Before":
        names = {id(parameter): name for name, parameter in model.named_parameters()}
        all_names = {name: names[id(p)] for name, p in model.named_parameters(remove_duplicate=False)}
        state = {name: leaf for name, leaf in model.state_dict(keep_vars=True).items() if isinstance(leaf, Tensor)}
        return cls(
            names=names,
            aliases={alias: name for alias, name in all_names.items() if alias != name},
            dtypes={name: tensor.dtype for name, tensor in state.items()},
            model_dtype=next((p.dtype for p in model.parameters() if p.is_floating_point()), None),
            unfilled=Unfilled(all_names.get(name, name) for name, leaf in state.items() if leaf.is_meta),
            buffer_names=frozenset(state) - frozenset(all_names),
        )


class _Working(NamedTuple):
    """What the model computes in: all but some modules of it, and its losses."""

    dtype: torch.dtype | None
    formats: Formats
    losses: Fp32Losses | None


# Elements of each parameter that are compared between ranks: enough to see two initialisations apart.
_NUM_COMPARED = 16


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
    before = _Before.of(model)
    half = dtype_of(settings.precision)
    in_fp32 = norms(model) if settings.formats.fp32_norms else set()
    formats = module_formats(model, settings.formats.fp32_modules, half, in_fp32)
    if optimizer is not None:
        _check_optimizer(optimizer, before.names)
    _check_same_weights(model, seed, layout)
    derive_buffers(model)
    divided = divide_model(model, settings.parallel, layout, find_samples)
    keep_formats(model, formats, half)
    samples = find_samples() if len(planner.placement) > 1 else NO_SAMPLES
    losses = Fp32Losses(model, finest_units(model)) if half and settings.formats.fp32_losses else None
    working = _Working(working_dtype(model, settings.precision), formats, losses)
    staged = _cut(model, planner.placement, settings, layout, device, working, samples, divided.between_stages)
    masters = _place(model, settings.precision, working, device, before.unfilled)
    buckets, boosted = None, None
    if optimizer is not None:
        _repoint(optimizer, before.names, dict(model.named_parameters()), masters, layout.tp.rank)
        holders = {n: tuple(sorted({planner.placement[s] for s in stages})) for n, stages in staged.owners.items()}
        buckets, boosted = _training(optimizer, model, divided, holders, masters, settings, layout)
        boosted.unfilled = before.unfilled
        if losses:
            boosted.again = losses.again
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
        dtypes=before.dtypes,
        model_dtype=before.model_dtype,
        formats=formats,
        unfilled=before.unfilled,
        aliases=before.aliases,
        buffer_names=before.buffer_names,
    )


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


def _check_optimizer(optimizer: Optimizer, names: dict[int, str]) -> None:
    if not isinstance(optimizer, Optimizer) or isinstance(optimizer, HybridOptimizer):
        raise ConfigError(f"boost takes a torch.optim optimizer: got {type(optimizer).__name__}.")
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ConfigError("LBFGS runs the model inside its step, which a schedule cannot. Use another optimizer.")
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if id(parameter) not in names:
                raise ConfigError(
                    f"the optimizer holds a parameter of shape {tuple(parameter.shape)} that the model does not have. "
                    "Build it on model.parameters(), after the last change to the model."
                )


def _check_same_weights(model: nn.Module, seed: int, layout: Layout) -> None:
    digest = zlib.crc32(str((seed, type(model).__qualname__)).encode())
    for name, parameter in model.named_parameters():
        digest = zlib.crc32(f"{name} {tuple(parameter.shape)} {parameter.dtype}".encode(), digest)
        if not parameter.is_meta:
            flat = parameter.detach().reshape(-1)
            some = flat[:: max(1, flat.numel() // _NUM_COMPARED)][:_NUM_COMPARED].double().cpu()
            digest = zlib.crc32(some.numpy().tobytes(), digest)
    for name, buffer in model.named_buffers():
        digest = zlib.crc32(f"{name} {tuple(buffer.shape)} {buffer.dtype} {buffer.is_meta}".encode(), digest)
    rows = layout.control.all_gather(torch.tensor([float(digest)], dtype=torch.float64))
    others = [rank for rank, row in enumerate(rows) if float(row) != float(rows[0])]
    if others:
        raise ConfigError(
            f"all ranks must boost the same model with the same weights and seed: rank {others[0]} differs from rank "
            "0. Call launch_from_torch(seed=...) before building the model, or load the same weights everywhere."
        )


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


def _repoint(
    optimizer: Optimizer,
    names: dict[int, str],
    owned: dict[str, nn.Parameter],
    masters: MasterWeights,
    tp_rank: int,
) -> None:
    """Let the optimizer work on what this rank owns; groups and their settings stay, also those left empty."""
    for group in optimizer.param_groups:
        kept = [place for place, parameter in enumerate(group["params"]) if names[id(parameter)] in owned]
        before = [group["params"][place] for place in kept]
        after = [masters.masters.get(names[id(parameter)], parameter) for parameter in before]
        for parameter in group["params"]:
            state = optimizer.state.pop(parameter, None)
            if state is not None and names[id(parameter)] in owned:
                target = masters.masters.get(names[id(parameter)], parameter)
                optimizer.state[target] = own_state(parameter, state, tp_rank)
        group["params"] = after
        if "param_names" in group:
            group["param_names"] = [group["param_names"][place] for place in kept]


def _training(
    optimizer: Optimizer,
    model: nn.Module,
    divided: Divided,
    holders: Mapping[str, tuple[int, ...]],
    masters: MasterWeights,
    settings: Settings,
    layout: Layout,
) -> tuple[GradientBuckets, HybridOptimizer]:
    trainable = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    groups = layout.groups_within_pipelines(sorted({ranks for ranks in holders.values() if len(ranks) > 1}))
    shared = {name: [groups[holders[name]]] for name in trainable if len(holders[name]) > 1}
    # Sorted: all ranks must sum in one order.
    for name in sorted(divided.summed & trainable.keys()):
        shared.setdefault(name, []).append(layout.tp)
    lies = placements(model)
    buckets = GradientBuckets(
        trainable,
        layout.dp,
        settings.optimizer.ddp_bucket_cap_mb,
        shared,
        communication_dtype=dtype_of(settings.optimizer.communication_precision),
        visible=settings.precision is Precision.FP32,
        alike=layout.tp,
    )
    if layout.tp.size > 1:
        share_copies(buckets, lies, layout)
    counted_at = [ranks[0] for ranks in holders.values()]
    counted = {n: None for n in trainable if holders[n][0] == layout.here.pp and counts_here(n, lies, layout.tp)}
    norm = AgreedNorm(
        control=layout.control,
        ranks=layout.pipelines[0],
        counted=tuple(counted),
        copied=tuple(
            name
            for name in trainable
            if name not in counted or (name in lies and not lies[name].counts_all_on(layout.tp.rank))
        ),
        width=max(counted_at.count(rank) for rank in range(layout.grid.pp_size)) if counted_at else 0,
        places=lies,
        tp_rank=layout.tp.rank,
    )
    boosted = HybridOptimizer(optimizer, buckets, masters, trainable, norm, settings.optimizer, settings.precision)
    return buckets, boosted
