"""The end of a step: one exchange of the losses and, if the optimizer needs it, the gradient norm."""

import zlib
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, TypeAlias

import numpy
import torch
from torch import Tensor

from hybridpp.cluster import Group, PendingNumbers, gather_numbers, start_gather_numbers
from hybridpp.errors import DeadlockError, PeerError
from hybridpp.nn.deferred_tensor import DeferredTensor, deferred
from hybridpp.partition import StagedModel
from hybridpp.pipeline import PipelineStep, RankProgram, SplitBatch, StepResult, check_equal, step_call
from hybridpp_plugins.background_save import SaveStatus
from hybridpp_plugins.criterion_check import CriterionCheck
from hybridpp_plugins.layout import Layout
from hybridpp_plugins.manual_clipping import ManualScaling
from hybridpp_plugins.optimizer import HybridOptimizer
from hybridpp_plugins.step_message import NUM_WITHOUT_NORM, OptimizerCalls, RankReport, message_of, summary_of
from hybridpp_plugins.step_problems import Diagnose, StepProblems

_NO_NUMBERS = torch.empty(0, dtype=torch.float64)
_SCALAR = torch.empty(())
_NO_CALLS = OptimizerCalls()


class StepEpilogue:
    """Ends every step of one boosted model.

    Every rank gets the losses of all ranks and, if the optimizer needs it, every rank's part of the gradient norm; the
    host waits for the device at most once. Losses alone are exchanged as soon as they are computed, while backward
    passes run, so that no rank waits for another's last action. Problems (inf or NaN, a criterion that returns a sum,
    gradients clipped by the script) are handled on every rank in the same way; a clean step runs none of that code.

    Args:
        staged: the model.
        layout: the ranks.
        placement: the rank of every stage in its pipeline.
        optimizer: the boosted optimizer, if there is one.
        criterion_check: checks criteria on this rank.
        diagnose: finds the first inf or NaN of a step by running it again; collective.
        device: of the losses that are returned.

    Attributes:
        saves: the save in the background, of which a step tells the other ranks; None: nothing is told.
        pending_losses: losses of evaluations whose exchange may still run.
    """

    def __init__(
        self,
        staged: StagedModel,
        layout: Layout,
        placement: tuple[int, ...],
        optimizer: HybridOptimizer | None,
        criterion_check: CriterionCheck,
        diagnose: Diagnose,
        device: torch.device,
    ):
        self._control = layout.control
        self._pipelines = layout.pipelines
        # By replica, the tensor-parallel ranks of the last stage, which compute the same losses.
        self._last_stages = [layout.ranks_at(replica, placement[-1]) for replica in range(layout.grid.dp_size)]
        self._own_last = self._last_stages[layout.here.dp][0]
        self._optimizer = optimizer
        self._criterion_check = criterion_check
        self._problems = StepProblems(staged, layout.pipelines, optimizer, criterion_check, diagnose)
        self._device = device
        self.saves: SaveStatus | None = None
        self.pending_losses: deque[DeferredTensor] = deque()
        self._evaluated: Any = None
        self._latest: _LossesOnly | None = None
        name = type(staged.model).__name__
        self._calls = {training: f"at the end of {step_call(name, training)}" for training in (True, False)}

    def begin(
        self, batch: SplitBatch, result: StepResult, task: PipelineStep, failure: Exception | None
    ) -> "PendingEnd":
        """Begin the end of a step, when this rank's losses are computed. Collective: all ranks.

        Args:
            batch: of this rank.
            result: of the step on this rank, as far as there is one.
            task: the step that runs.
            failure: why this rank refuses the step; None: it does not.
        """
        optimizer = self._optimizer if task.training else None
        detector = self._optimizer.accumulated.clip_detector if self._optimizer else None
        report = RankReport(
            failed=float(failure is not None),
            reduction=float(self._criterion_check.reduction),
            scaled=detector.report() if detector else ManualScaling(),
            calls=self._optimizer_calls(),
            wrote_buffer=float(optimizer is not None and optimizer.has_new_buffers),
            save=0.0 if self.saves is None or self.saves.current is None else float(self.saves.current.outcome),
        )

        def message(losses: list[float], digest: float) -> list[float]:
            return message_of(batch, result, losses, report._replace(digest=digest))

        losses = result.losses.double() if any(result.has_loss) else _NO_NUMBERS
        call = self._calls[task.training]
        if optimizer and optimizer.sends_norm_with_loss:
            return _WithNorm(self._control, call, losses, batch.unchecked, message, optimizer)
        self._latest = _LossesOnly(self._control, call, losses, batch.unchecked, message)
        return self._latest

    def _optimizer_calls(self) -> OptimizerCalls:
        optimizer = self._optimizer
        return OptimizerCalls(optimizer.accumulated.num_passes, optimizer.applied_steps) if optimizer else _NO_CALLS

    def loss(
        self, pending: "PendingEnd", program: RankProgram, task: PipelineStep, failure: Exception | None, identity: Any
    ) -> Tensor:
        """The loss of this replica's batch, a scalar; in evaluation a tensor that waits for it when it is read.

        In training it is known by now, or all ranks wait for the norm. In evaluation the last stage is behind the
        others, which go on with the next batch.

        Args:
            pending, program, task, failure: see :meth:`close`.
            identity: of the criterion.

        Raises:
            Exception: see :meth:`close`; in evaluation, whenever the loss is read, or in a later step. What is wrong
                with a criterion is raised in its first step, on all ranks.
        """

        refusal: Exception | None = None

        def close() -> Tensor:
            nonlocal refusal
            # The losses are exchanged once: who reads the loss again after an error gets the same error.
            if refusal is not None:
                raise refusal
            try:
                return self.close(pending, program, task, failure).to(self._device, non_blocking=True)
            except Exception as error:
                refusal = error
                raise

        if task.training or identity != self._evaluated:
            loss = close()
            self._evaluated = self._evaluated if task.training else identity
            return loss
        loss = deferred(_SCALAR, close, dtype=torch.float32, device=self._device)
        self.pending_losses.append(loss)
        return loss

    def wait_for_losses(self, num_left: int = 0) -> None:
        """Wait for the losses of evaluations, except the last ``num_left``. Call it before the next step."""
        while len(self.pending_losses) > num_left:
            self.pending_losses.popleft().values_now()

    def check_calls(self) -> None:
        """Raise if the end of an earlier step shows that ranks are in different calls.

        Call it when another rank is gone: its error may be that, and this rank has not waited for the exchange yet.

        Raises:
            UnlikeCallsError: they are.
        """
        with suppress(PeerError, DeadlockError):
            if self._latest is not None:
                self._latest.check_calls()
            self.wait_for_losses()

    def close(
        self, pending: "PendingEnd", program: RankProgram, task: PipelineStep, failure: Exception | None
    ) -> Tensor:
        """The loss of this replica's batch, a scalar in host memory; the optimizer gets the norm.

        Collective: all ranks; one small all-gather of host memory, unless it is under way.

        Args:
            pending: from :meth:`begin`.
            program: that ran the step.
            task: the step that was run.
            failure: why this rank refuses the step.

        Raises:
            DataError: ranks of a pipeline hold other values of the batch on their devices.
            ConfigError: the criterion returns a sum, or the script clipped gradients by each rank's own norm.
            NonFiniteLossError: in training, a loss is inf or NaN.
            UnequalRanksError: tensor-parallel ranks computed different losses.
            PeerError: other ranks refuse the step.
            UnlikeCallsError: ranks are in different calls, or called the optimizer differently; raised on all of them.
            Exception: ``failure``.
        """
        summary = summary_of(pending.wait(), self._last_stages, self._own_last)
        optimizer = self._optimizer if task.training else None
        has_overflow = optimizer is not None and optimizer.sends_norm_with_loss and optimizer.wants_report
        if failure is not None or has_overflow or not summary.is_clean:
            self._problems.handle(summary, program, task, failure)
        else:
            check_equal(summary.digests, self._pipelines)
        if optimizer is not None and optimizer.replica_buffers is not None:
            optimizer.replica_buffers.agree(any(report.wrote_buffer for report in summary.reports))
        if optimizer is not None and self.saves is not None and self.saves.current is not None:
            self.saves.heard([report.save for report in summary.reports])
        return torch.tensor(summary.loss, dtype=torch.float32)


_MessageOf: TypeAlias = Callable[[list[float], float], list[float]]


class _LossesOnly:
    """The exchange of losses, which begins as soon as the host knows them."""

    def __init__(self, control: Group, call: str, losses: Tensor, unchecked: Sequence[Tensor], message_of: _MessageOf):
        self._control, self._call, self._message_of = control, call, message_of
        self._copy = HostCopy([losses], unchecked, early=True)
        self._exchange: PendingNumbers | None = None
        if losses.is_cpu and not unchecked:
            self._exchange = self._begin()

    def _begin(self) -> PendingNumbers:
        return start_gather_numbers(self._control, self._call, self._message_of(*self._copy.read()))

    def wait(self) -> Sequence[Sequence[float]]:
        """The messages of all ranks."""
        if self._exchange is None:
            self._exchange = self._begin()
        return self._exchange.wait()

    def check_calls(self) -> None:
        """Wait for the exchange if it has begun, for what :meth:`StepEpilogue.check_calls` raises."""
        if self._exchange is not None:
            self._exchange.wait()


class _WithNorm:
    """The exchange of losses and norms, when all gradients are complete."""

    def __init__(
        self,
        control: Group,
        call: str,
        losses: Tensor,
        unchecked: Sequence[Tensor],
        message_of: _MessageOf,
        optimizer: HybridOptimizer,
    ):
        self._control, self._call, self._losses, self._unchecked = control, call, losses, unchecked
        self._message_of, self._optimizer = message_of, optimizer

    def wait(self) -> Sequence[Sequence[float]]:
        """The messages of all ranks; the optimizer gets the norm."""
        optimizer, parts = self._optimizer, self._optimizer.norm_parts()
        # All in one copy: this is the step's only wait for the device.
        joined = [self._losses, parts, optimizer.unread_flags()]
        numbers, digest = HostCopy(joined, self._unchecked, early=False).read()
        before = self._losses.numel()
        after = before + parts.numel()
        optimizer.take_flags(numbers[after:])
        message = [*self._message_of(numbers[:before], digest), *optimizer.norm.message(numbers[before:after])]
        messages = gather_numbers(self._control, self._call, message)
        optimizer.set_norm([numbers[NUM_WITHOUT_NORM:] for numbers in messages])
        return messages


PendingEnd = _LossesOnly | _WithNorm


class HostCopy:
    """A copy of numbers, and of bytes of which only the digest is wanted, in host memory.

    Args:
        numbers: tensors of float64.
        unchecked: tensors of uint8 on a device.
        early: whether it is read later: on CUDA the host then waits for nothing that is started in between.
    """

    def __init__(self, numbers: Sequence[Tensor], unchecked: Sequence[Tensor], *, early: bool):
        pieces = [piece for piece in numbers if piece.numel()]
        self._has_bytes = bool(unchecked)
        self._num_numbers = sum(piece.numel() for piece in pieces)
        if unchecked:
            device = unchecked[0].device
            pieces = [piece.view(torch.uint8).to(device) for piece in (*pieces, *unchecked)]
        self._copy, self._event = torch.cat(pieces) if pieces else _NO_NUMBERS, None
        if early and self._copy.is_cuda:
            pinned = torch.empty(self._copy.shape, dtype=self._copy.dtype, pin_memory=True)
            pinned.copy_(self._copy, non_blocking=True)
            self._copy = pinned
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]  # torch
            self._event.record()

    def read(self) -> tuple[list[float], float]:
        """The numbers, and the digest of the bytes; -1 of none."""
        if self._event is not None:
            self._event.synchronize()
        if not self._has_bytes:
            return (self._copy.tolist() if self._num_numbers else []), -1.0
        host, size = self._copy.cpu().numpy(), 8 * self._num_numbers
        return host[:size].view(numpy.float64).tolist(), float(zlib.crc32(host[size:].tobytes()))
