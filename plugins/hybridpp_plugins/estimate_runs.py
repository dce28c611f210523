"""Recorded runs and traces of one model, for estimates: each is made once for a way to shard and to run it."""

import copy
import hashlib
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from hybridpp.checkpoint import derive_buffers
from hybridpp.cluster import preserved_random_state
from hybridpp.config import ParallelConfig, PartitionConfig, Precision
from hybridpp.errors import ConfigError, HybridppError, named
from hybridpp.estimate import (
    CannotLeaveOutError,
    CudaAttention,
    Hollow,
    Memory,
    ModelRun,
    NeedsValuesError,
    NotPeriodicError,
    OpLog,
    Repeated,
    UnitRecorder,
    UnitTimes,
    clock_of,
    median_times,
    repeated_blocks,
    repeated_inside,
    with_repeated_blocks,
)
from hybridpp.module_adapter import ModuleAdapter
from hybridpp.nn.snapshot import preserved_modules
from hybridpp.nn.torch_private import pytree
from hybridpp.partition import (
    BoundarySharding,
    TracedModel,
    describe_sample,
    find_units,
    finest_units,
    trace_model,
)
from hybridpp.pipeline import call_arguments
from hybridpp.precision import (
    FunctionCasts,
    dtype_changes,
    find_module_dtypes,
    fp32_norms,
    torch_dtype,
    working_dtype,
    wrap_dtype_boundaries,
)
from hybridpp_plugins.apply_tp import AppliedTensorParallel, Sharding, apply_sharding, placements
from hybridpp_plugins.estimate_batch import PASS_A_BATCH, BatchSource, EstimateBatch
from hybridpp_plugins.estimate_sharding import ShardingSearch
from hybridpp_plugins.find_tp_plan import default_formats
from hybridpp_plugins.solo_group import Note, SoloGroup, SoloMessage
from hybridpp_plugins.solo_run import SoloRank, SoloSettings

_LOGGER = logging.getLogger("hybridpp")
_CPU = torch.device("cpu")
_T = TypeVar("_T")


class LocalParameter(NamedTuple):
    """A parameter on a rank that holds it.

    Attributes:
        meta: with the shape of the rank's shard, in its working dtype, on the meta device.
        is_trained: whether it has a gradient.
        is_summed: whether tensor-parallel ranks hold summands of its gradient.
    """

    meta: Tensor
    is_trained: bool
    is_summed: bool


class Traced(NamedTuple):
    """A sharded model, traced to be cut.

    Attributes:
        model: it, on the meta device.
        found: its trace.
        between: shards the values between stages; None: they are sent unsharded.
        parameters: what a rank that holds all stages has, by name.
        buffer_bytes: of the model's buffers.
    """

    model: nn.Module
    found: TracedModel
    between: BoundarySharding | None
    parameters: Mapping[str, LocalParameter]
    buffer_bytes: int


@dataclass(frozen=True)
class RunKind:
    """A way to run a model.

    Attributes:
        tp_size: ranks that share its layers.
        shards_sequences: whether they shard sequences, too.
        microbatch_size: samples.
        recomputed: names of blocks that are recomputed.
        splits: whether weight gradients are computed apart.
        recomputable: names of blocks that other runs recompute: one rank serves them all.
    """

    tp_size: int = 1
    shards_sequences: bool = False
    microbatch_size: int = 1
    recomputed: frozenset[str] = frozenset()
    splits: bool = False
    recomputable: frozenset[str] = frozenset()

    @property
    def of_rank(self) -> "RunKind":
        """What must be the same of runs on one rank: to set one up takes longer than to run it."""
        recomputable = self.recomputable | self.recomputed
        return RunKind(self.tp_size, self.shards_sequences, recomputable=recomputable)


class EstimateRuns:
    """Runs one model on no memory.

    Args:
        model: on any device; it is not changed, and its values are not read.
        parallel: settings of tensor parallelism; the sizes do not count.
        precision: of the plugin.
        batches: makes micro-batches.
        device: kind of the device to compute on.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        parallel: ParallelConfig | None = None,
        precision: Precision = Precision.FP32,
        batches: BatchSource | None = None,
        device: str = "cpu",
    ):
        self._model = meta_copy(model)
        self._precision, self._device = precision, device
        self._batches = batches or BatchSource()
        self._candidate: int | None = None
        self._withholds = True
        self._never_left_out: set[tuple[str, ...]] = set()
        formats = default_formats(self._model, precision, device)
        self._search = ShardingSearch(self._model, parallel or ParallelConfig(), self._batches.sample, formats)
        self.sharding = cache(self._find_sharding)
        self.run = cache(self._run)
        self._ready = cache(self._make_ready)
        self._repeated = cache(self._find_repeated)
        self.traced = cache(self._trace)

    def _find_sharding(self, tp_size: int, shards_sequences: bool) -> Sharding | None:
        """How the model's layers, and sequences, are sharded; None: over one rank."""
        if tp_size == 1:
            return None
        return self._search.find(tp_size, shards_sequences)

    def _sharded(
        self, tp_size: int, shards_sequences: bool, note: Note | None = None
    ) -> tuple[ModuleAdapter, AppliedTensorParallel]:
        sharding = self.sharding(tp_size, shards_sequences)
        model = meta_copy(self._model)
        derive_buffers(model)
        adapter = ModuleAdapter(model)
        group = SoloGroup(tp_size, self._device != "cpu", note or (lambda message: lambda: None), note is None)
        return adapter, apply_sharding(adapter, sharding, group)

    def _trace(self, tp_size: int, shards_sequences: bool, microbatch_size: int, num_stages: int) -> Traced:
        """The trace of a sharded model for a number of stages."""
        adapter, applied_tp = self._sharded(tp_size, shards_sequences)
        model, half = adapter.model, torch_dtype(self._precision)
        module_dtypes = find_module_dtypes(model, (), half, fp32_norms(model, None, self._device))
        wrap_dtype_boundaries(adapter, module_dtypes, half)
        casts = FunctionCasts(adapter, finest_units(model), True, []) if half else None
        dtype = working_dtype(model, self._precision)
        changes = dtype_changes(model, dtype, module_dtypes)
        model.train()

        def trace(batch: EstimateBatch) -> TracedModel:
            args, kwargs = call_arguments(batch.inputs)
            with preserved_modules(model):
                return trace_model(model, num_stages, (args, kwargs), PartitionConfig(), changes)

        found = self._on_a_batch(model, microbatch_size, trace)
        del casts
        shards = placements(model)
        summed = applied_tp.summed | {name for name, one in shards.items() if one.has_copies()}
        parameters = {
            name: LocalParameter(
                torch.empty_like(one, dtype=changes.get(id(one), one.dtype), device="meta", requires_grad=False),
                one.requires_grad,
                name in summed,
            )
            for name, one in model.named_parameters()
        }
        buffers = {id(one): one.numel() * changes.get(id(one), one.dtype).itemsize for one in model.buffers()}
        return Traced(
            model, found._replace(interceptor=None), applied_tp.between_stages, parameters, sum(buffers.values())
        )

    def _run(self, kind: RunKind, units: tuple[str, ...], settled: bool = True) -> ModelRun:
        """The recorded run of one micro-batch, in which these units are marked; ``settled``: not of the first one.

        If it need not be, blocks that are equal to others are left out, and their part of the record is repeated.
        """
        left_out = () if settled else self._repeated(units, kind.recomputed)
        while left_out := tuple(row for row in left_out if row.names not in self._never_left_out):
            try:
                complete = with_repeated_blocks(self._record(kind, units, settled, left_out), left_out)
                return replace(complete, calls=tuple(call for call in complete.calls if call.name in units))
            except NeedsValuesError:
                self._compute_masks()
                continue
            except Exception as error:  # also whatever a model raises that needs something of each block
                rows = _rows_to_run(error, left_out)
                _LOGGER.debug("blocks run from %s, as they cannot be left out", rows[0].names[0], exc_info=True)
            self._never_left_out.update(row.names for row in rows)
        try:
            return self._record_all(kind, units, settled)
        except NeedsValuesError:
            self._compute_masks()
            return self._record_all(kind, units, settled)

    def _record_all(self, kind: RunKind, units: tuple[str, ...], settled: bool) -> ModelRun:
        try:
            return self._record(kind, units, settled)
        except HybridppError:
            raise
        except Exception as error:  # whatever a model's forward raises: it may run on other sizes
            raise self._refusal(kind.microbatch_size, error) from error

    def _refusal(self, size: int, error: Exception) -> ConfigError:
        made, way_out = " that was made from its configuration", f", or {PASS_A_BATCH}"
        if self._batches.sample is not None:
            made, way_out = "", ""
        samples, larger = ("1 sample", "larger micro-batches") if size == 1 else (f"{size} samples", "another size")
        return ConfigError(
            f"{type(self._model).__name__} does not run on a micro-batch of {samples}{made}: {named(error)}. "
            f"Use {larger}{way_out}."
        )

    def _find_repeated(self, units: tuple[str, ...], recomputed: frozenset[str]) -> tuple[Repeated, ...]:
        """Blocks that need not run: units, and blocks inside of units that are no blocks of the model themselves."""
        blocks = set(find_units(self._model, 1).blocks)
        inside = [row for unit in units if unit not in blocks for row in repeated_inside(self._model, unit)]
        return (*repeated_blocks(self._model, units, recomputed), *inside)

    def _compute_masks(self) -> None:
        """From now on, all values that can be computed are: the model reads some of them."""
        _LOGGER.debug("masks are computed, as the model may read them", exc_info=True)
        self._withholds = False
        self._ready.cache_clear()

    def _record(
        self, kind: RunKind, units: tuple[str, ...], settled: bool, left_out: tuple[Repeated, ...] = ()
    ) -> ModelRun:
        ready = self._ready(kind.of_rank, units, left_out)
        rank, recorder = ready.rank, ready.recorder
        losses: list[int] = []
        attention = nullcontext() if self._device == "cpu" else CudaAttention()
        with ready.hollow, preserved_random_state(_CPU), attention:
            rank.splits, rank.recomputes = kind.splits, bool(kind.recomputed)
            # What is recorded is not the first micro-batch of a step: it adds to gradients that are there.
            if self._candidate is None:
                batch = self._on_a_batch(ready.model, kind.microbatch_size, rank.tried)
            else:
                batch = list(self._batches.candidates(self._model, kind.microbatch_size))[self._candidate]
                if settled or not ready.has_run:
                    with ready.recorded(None):
                        rank.tried(batch)

            def criterion(outputs: Any, inputs: Any) -> Tensor:
                loss = batch.criterion(outputs, inputs)
                del outputs
                losses.append(log.event)
                return loss

            # Of runs before, which may have split their passes, only the sums are left.
            rank.buckets.begin()
            with OpLog() as log, ready.recorded(log), log.noting_saved():
                rank.run(batch.inputs, criterion)
        numbers = {id(one): number for number, one in enumerate(log.allocations)}
        run = ModelRun(
            calls=tuple(call.with_allocations(lambda one: numbers.get(id(one))) for call in recorder.calls),
            memory=Memory.of(log.allocations),
            ops=log.ops,
            loss=losses[-1],
            pass_end=ready.passes[0],
            backward_end=ready.ends[0],
            end=log.event,
            recomputed=kind.recomputed,
        )
        ready.has_run = True
        # Outputs that are gathered late hold the graph, and so the rank.
        recorder.clear()
        return run

    def _make_ready(self, kind: RunKind, units: tuple[str, ...], left_out: tuple[Repeated, ...]) -> "_ReadyRank":
        adapter, applied_tp = self._sharded(kind.tp_size, kind.shards_sequences, lambda message: ready.note(message))
        adapter.model.train()
        settings = SoloSettings(precision=self._precision, device=self._device, recomputed=kind.recomputable)
        ready = _ReadyRank(adapter, units, left_out, self._withholds)
        with ready.hollow, preserved_random_state(_CPU), ready.hollow.without_masks():
            ready.start(SoloRank(adapter, applied_tp, settings, SoloGroup(1)))
        return ready

    def timed(self, kind: RunKind, units: tuple[str, ...], where: torch.device, repeats: int = 9) -> UnitTimes:
        """When the units run on a device, measured: the median of several runs, with random weights.

        Sums over tensor-parallel ranks are left out: the rank runs alone.

        Args:
            kind: how the model is run.
            units: that are marked.
            where: the device, on which all of the model must fit.
            repeats: number of runs.
        """
        adapter, applied_tp = self._sharded(kind.tp_size, kind.shards_sequences)
        adapter.model.train()

        now = clock_of(where)

        recorder = UnitRecorder(adapter, units, now)
        settings = SoloSettings(
            precision=self._precision,
            device=where.type,
            where=where,
            recomputed=kind.recomputed,
            splits=kind.splits,
        )
        runs = []
        with preserved_random_state(where):
            rank = SoloRank(adapter, applied_tp, settings, SoloGroup(1))
            with torch.no_grad():
                for tensor in (*adapter.model.parameters(), *adapter.model.buffers()):
                    if tensor.is_floating_point() and tensor.dim() > 1:
                        tensor.normal_(std=0.02)
                    elif tensor.is_floating_point() and isinstance(tensor, nn.Parameter):
                        tensor.fill_(1.0)
            rank.buckets.zero()
            batch = self._on_a_batch(adapter.model, kind.microbatch_size, rank.tried)
            ends: list[float] = []
            rank.after_backward = lambda: ends.append(now())
            losses: list[float] = []

            def criterion(outputs: Any, inputs: Any) -> Tensor:
                loss = batch.criterion(outputs, inputs)
                losses.append(now())
                return loss

            for _ in range(repeats):
                recorder.clear()
                ends.clear()
                recorder.is_recording = True
                start = now()
                rank.run(batch.inputs, criterion)
                recorder.is_recording = False
                runs.append(_times_of(recorder, start, losses[-1], ends, self.key_of(kind)))
        return median_times(runs)

    @property
    def notes(self) -> tuple[str, ...]:
        """What the micro-batches that have run have of images, and lack that the model takes."""
        if self._batches.sample is not None or self._candidate is None:
            return ()
        batch = list(self._batches.candidates(self._model, 1))[self._candidate]
        asked = self._batches.images, self._batches.sequence_length
        return tuple(describe_sample(self._model, batch.inputs, *asked))

    def key_of(self, kind: RunKind) -> str:
        """What a measured time is of: the model's class and sizes, and how it was run."""
        names = [(name, tuple(one.shape)) for name, one in self._model.named_parameters()]
        batch = next(self._batches.candidates(self._model, kind.microbatch_size)).inputs
        shapes = [tuple(leaf.shape) for leaf in pytree.tree_leaves(batch) if isinstance(leaf, Tensor)]
        text = repr((names, shapes, sorted(kind.recomputed), kind.splits, kind.shards_sequences))
        digest = hashlib.sha256(text.encode()).hexdigest()[:16]
        size = f"tp_size={kind.tp_size}, microbatch_size={kind.microbatch_size}"
        return f"{type(self._model).__name__}, {self._precision}, {size}, {digest}"

    def _on_a_batch(self, model: nn.Module, size: int, function: Callable[[EstimateBatch], _T]) -> _T:
        """The result of ``function`` for the first micro-batch that the model runs on: the same one every time."""
        # The model without what is put on it, which hides the arguments of its forward.
        candidates = list(self._batches.candidates(self._model, size))
        if self._candidate is not None:
            return function(candidates[self._candidate])
        first: Exception | None = None
        for number, batch in enumerate(candidates):
            try:
                result = function(batch)
            except Exception as error:  # whatever a model's forward raises
                first = first or error
                continue
            if isinstance(result, EstimateBatch):
                # A trace runs no criterion, so it does not show which batch the loss can be computed of.
                self._candidate = number
            return result
        assert first is not None, "there is a candidate"
        if isinstance(first, HybridppError):
            raise first
        raise self._refusal(size, first) from first


class _ReadyRank:
    """A rank that holds all stages of a model on no memory, of which runs are recorded.

    Args:
        adapter: of the sharded model.
        units: that are marked.
        left_out: rows of them that do not run.
        withholds: whether large masks are not computed, see :class:`~hybridpp.nn.hollow.Hollow`.

    Attributes:
        model: the sharded model.
        hollow: the context that it runs in.
        recorder: of its units.
        rank: it; set by :meth:`start`, in the context.
        passes: of the latest recorded run, the events at which B, and I and W, had run.
        ends: the same, when what they left had been added.
        has_run: whether a run was recorded.
    """

    rank: SoloRank

    def __init__(self, adapter: ModuleAdapter, units: tuple[str, ...], left_out: tuple[Repeated, ...], withholds: bool):
        self.model, self.hollow = adapter.model, Hollow(withholds)
        self._log: OpLog | None = None
        self.recorder = UnitRecorder(
            adapter,
            units,
            lambda: self._log.event if self._log else 0,
            lambda tensor: self._log.of(tensor) if self._log else None,
            {name: row.period for row in left_out for name in row.names},
            [name for row in left_out for name in row.row if name not in units],
        )
        self.passes: list[int] = []
        self.ends: list[int] = []
        self.has_run = False

    def start(self, rank: SoloRank) -> None:
        """Let this rank run."""
        self.rank = rank
        rank.pass_ended = lambda: self.passes.append(self._log.event if self._log else 0)
        rank.after_backward = lambda: self.ends.append(self._log.event if self._log else 0)

    def note(self, message: SoloMessage) -> Callable[[], None]:
        """Record a communication; what is returned records that the rank waits for its end."""
        log = self._log
        return (lambda: None) if log is None else partial(log.note_wait, log.note_message(*message))

    @contextmanager
    def recorded(self, log: OpLog | None) -> Iterator[None]:
        """Inside, what runs is recorded in a log; None: it runs as it will be recorded."""
        self.passes.clear()
        self.ends.clear()
        self.recorder.clear()
        self._log, self.recorder.is_recording = log, True
        try:
            yield
        finally:
            self._log, self.recorder.is_recording = None, False


def _rows_to_run(error: Exception, left_out: Sequence[Repeated]) -> Sequence[Repeated]:
    """Of the rows that were left out, those that an error is of."""
    if isinstance(error, NotPeriodicError):
        return [error.row]
    if isinstance(error, CannotLeaveOutError):
        return [row for row in left_out if error.name in row.names]
    return left_out


def _times_of(recorder: UnitRecorder, start: float, loss: float, ends: list[float], key: str) -> UnitTimes:
    calls = recorder.calls
    return UnitTimes(
        key=key,
        names=tuple(call.name for call in calls),
        begins=tuple(call.begin - start for call in calls),
        ends=tuple(call.end - start for call in calls),
        gradients=tuple(None if call.gradient is None else call.gradient - start for call in calls),
        loss=loss - start,
        backward_end=ends[0] - start,
        end=ends[-1] - start,
    )


def meta_copy(model: nn.Module) -> nn.Module:
    """A copy of a model whose parameters are on the meta device; its buffers have their values."""
    memo: dict[int, Any] = {
        id(one): nn.Parameter(torch.empty_like(one, device="meta"), one.requires_grad) for one in model.parameters()
    }
    for one in model.parameters():
        vars(memo[id(one)]).update(vars(one))
    copied: nn.Module = copy.deepcopy(model, memo)
    return copied
