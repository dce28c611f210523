"""Run one rank's code of a step alone, with all layers of the model on one stage: what estimates are made of."""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hybridpp.checkpoint import allocate
from hybridpp.cluster import DrawMonitor, Group
from hybridpp.config import Precision
from hybridpp.data_parallel import GradientBuckets, layout_of
from hybridpp.module_adapter import ModuleAdapter
from hybridpp.nn.torch_private import apply_to_tensors
from hybridpp.partition import StagedModel, StagingOptions, finest_units
from hybridpp.pipeline import Executor, Microbatch, PipelineStep, RankProgram, Transport, rank_programs
from hybridpp.precision import (
    FunctionCasts,
    cast_model,
    dtype_changes,
    find_module_dtypes,
    fp32_norms,
    torch_dtype,
    working_dtype,
    wrap_dtype_boundaries,
)
from hybridpp.schedule import Action, ActionKind
from hybridpp_plugins.apply_tp import AppliedTensorParallel
from hybridpp_plugins.estimate_batch import EstimateBatch

_CPU = torch.device("cpu")
_BUCKET_MIB = 25.0


@dataclass(frozen=True, kw_only=True)
class SoloSettings:
    """What decides how a rank computes, beside its layers.

    Attributes:
        precision: of the plugin.
        device: kind of device to compute for: its norms and its overlapping of communication count.
        where: the device that computes.
        recomputed: names of the blocks that are recomputed.
        splits: whether weight gradients are computed apart (W).
    """

    precision: Precision
    device: str = "cpu"
    where: torch.device = _CPU
    recomputed: frozenset[str] = frozenset()
    splits: bool = False


class SoloRank:
    """One rank that holds all stages of a sharded model, ready to run.

    Args:
        adapter: of the model, after tensor parallelism.
        applied_tp: what that put on it.
        settings: of the run.
        alone: a group of one rank.

    Attributes:
        splits: whether weight gradients are computed apart in the next run.
        recomputes: whether blocks that are recomputed are in the next run; else they keep all that they need.
        pass_ended: called after B, and after I and W.
        after_backward: called then, when small gradients have been added.
    """

    def __init__(self, adapter: ModuleAdapter, applied_tp: AppliedTensorParallel, settings: SoloSettings, alone: Group):
        model, half = adapter.model, torch_dtype(settings.precision)
        module_dtypes = find_module_dtypes(model, (), half, fp32_norms(model, None, settings.device))
        wrap_dtype_boundaries(adapter, module_dtypes, half)
        casts = FunctionCasts(adapter, finest_units(model), True, []) if half else None
        dtype = working_dtype(model, settings.precision)
        staging = StagingOptions(
            compute_dtype=dtype,
            dtypes=dtype_changes(model, dtype, module_dtypes),
            recomputed=tuple(sorted(settings.recomputed)),
            recompute_context=casts.recompute_context if casts else nullcontext,
            sequence_blocks=dict(applied_tp.sequence_blocks),
            draws=applied_tp.draws or DrawMonitor(),
        )
        where = settings.where
        self.staged = StagedModel(adapter, 1, [0], device=where, samples=[], staging=staging)
        apply_to_tensors(model, lambda tensor: tensor if tensor.is_meta else tensor.to(where))
        cast_model(adapter, dtype, module_dtypes)
        allocate(model, (), where)
        parameters = {name: one for name, one in model.named_parameters() if one.requires_grad}
        is_exposed = settings.precision is Precision.FP32
        self.buckets = GradientBuckets(
            parameters, alone, layout_of(parameters, alone, _BUCKET_MIB), exposes_grad=is_exposed
        )
        applied_tp.weight_gradients.attach_sink(self.buckets.outside())
        self.executor = Executor(
            self.staged, Transport(alone, where), where, applied_tp.weight_gradients, applied_tp.in_a_step
        )
        self.splits, self.recomputes = settings.splits, True
        self.pass_ended: Callable[[], None] = lambda: None
        self.after_backward: Callable[[], None] = lambda: None

    def tried(self, batch: EstimateBatch) -> EstimateBatch:
        """The batch, on which it has run once: so its gradients are in the state that they have in later steps."""
        self.buckets.begin()
        self.run(batch.inputs, batch.criterion)
        return batch

    def run(self, batch: Any, criterion: Callable[[Any, Any], Tensor]) -> None:
        """Forward and backward of one micro-batch."""
        step = PipelineStep(
            microbatches=[Microbatch(batch, 1, 1.0)],
            loss_weights=[1.0],
            keys=[0],
            criterion=criterion,
            training=True,
            keep_outputs=False,
            max_stored_microbatches=0 if self.recomputes else 1,
            begin_last_backward=self.buckets.begin_last_backward,
            end_backward=self._end_backward,
            reduce_gradients=self.buckets.launch_remaining,
        )
        self.executor.run(_program(self.splits), step)

    def _end_backward(self) -> None:
        self.pass_ended()
        self.buckets.end_backward()
        self.after_backward()


def _program(splits: bool) -> RankProgram:
    kinds = (ActionKind.INPUT_GRADIENT, ActionKind.WEIGHT_GRADIENT) if splits else (ActionKind.BACKWARD,)
    (program,) = rank_programs((tuple(Action(0, kind, 0) for kind in (ActionKind.FORWARD, *kinds)),))
    return program
