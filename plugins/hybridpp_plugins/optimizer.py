"""The boosted optimizer: reduce, unscale, clip, step or skip."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge
from torch.optim import Optimizer

from hybridpp.config import OptimizerConfig, Precision
from hybridpp.data_parallel import GradientReducer, RunningStatistics, UpdateTarget
from hybridpp.errors import ConfigError
from hybridpp.optim import GlobalGradNorm
from hybridpp.precision import LossScaler, MasterWeights
from hybridpp_plugins.accumulated_gradients import AccumulatedGradients, clip_factor
from hybridpp_plugins.failed_pass import FailedPass
from hybridpp_plugins.grad_access_warning import GradAccessWarning
from hybridpp_plugins.manual_forward import ManualCallRecorder
from hybridpp_plugins.nonfinite_steps import NonFiniteSteps
from hybridpp_plugins.optimizer_state import OptimizerStateOwner
from hybridpp_plugins.replica_buffers import ReplicaBuffers
from hybridpp_plugins.stop_exchange import StopExchange
from hybridpp_plugins.uninitialized import UninitializedWeights
from hybridpp_plugins.wrapped_optimizer import WrappedOptimizer


class GroupBefore(NamedTuple):
    """The parameters of a group before boost.

    Attributes:
        names: in the model.
        param_names: that the script gave them; empty: it gave none.
    """

    names: tuple[str, ...]
    param_names: tuple[str, ...]

    @classmethod
    def of(cls, group: Mapping[str, Any], names: Mapping[int, str]) -> "GroupBefore":
        """Those of a group, given the names of the model's parameters, by ``id``."""
        return cls(tuple(names[id(parameter)] for parameter in group["params"]), tuple(group.get("param_names", ())))


class HybridOptimizer(WrappedOptimizer):
    """Any ``torch.optim`` optimizer, on the parameters that this rank owns or on their fp32 masters.

    In every precision, backward passes accumulate gradients until ``step``, which consumes them: the next backward pass
    starts from zero, whether or not ``zero_grad`` is called.

    In fp32 ``parameter.grad`` is the gradient; in half precision it is None, and :meth:`gradients` returns it.

    Attributes:
        uninitialized: weights of the model that have no values yet.
        manual_calls: the script's calls of the model, if they are recorded.
        recompute_context: a context for the backward pass, in which activation checkpointing may run the forward again.
        target: the tensors that it updates.
        groups_before: what its groups had before boost.
        norm: computes the gradient norm over all ranks.
        accumulated: the gradients.
        nonfinite_steps: skips or refuses steps with inf or NaN gradients.
        grad_access_warning: warns if the script looks for gradients that half precision does not expose.
        statistics: running statistics of the model; None: it has none.
        replica_buffers: buffers that the first replica sends to the others; None: there are none.
        stop_exchange: tells all ranks of signals in the script's own backward passes.
        failed_pass: notes errors in the script's own passes; None: there is one rank.
        while_updating: a context to run :meth:`step` in.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        reducer: GradientReducer,
        target: UpdateTarget,
        masters: MasterWeights,
        norm: GlobalGradNorm,
        config: OptimizerConfig,
        precision: Precision,
        owner: OptimizerStateOwner,
    ):
        self._scales = precision is Precision.FP16
        super().__init__(optimizer, masters, LossScaler(config.loss_scale, self._scales), owner, norm.control)
        self.uninitialized = UninitializedWeights(())
        self.manual_calls: ManualCallRecorder | None = None
        self.statistics: RunningStatistics | None = None
        self.replica_buffers: ReplicaBuffers | None = None
        self.stop_exchange: StopExchange | None = None
        self.failed_pass: FailedPass | None = None
        self.recompute_context: Callable[[], AbstractContextManager[None]] = nullcontext
        self.while_updating: Callable[[], AbstractContextManager[None]] = nullcontext
        self._reducer = reducer
        self.target = target
        self.groups_before: Sequence[GroupBefore] = ()
        self.norm = norm
        self._max_norm = config.max_norm
        self._needs_norm = self._scales or config.max_norm > 0 or config.error_if_nonfinite is not None
        self.accumulated = AccumulatedGradients(reducer, norm, config.fused_optimizer is not False)
        self.nonfinite_steps = NonFiniteSteps(config, self._scales, self.loss_scaler, self.accumulated)
        self.grad_access_warning = GradAccessWarning(reducer)

    @property
    def loss_scale(self) -> float:
        """Factor on the loss in the backward pass; 1 unless fp16."""
        return self.loss_scaler.state.scale

    @property
    def overflow_report(self) -> str:
        """The source of the last inf or NaN in a gradient, as far as it was searched; "" before the first one."""
        return self.nonfinite_steps.report

    @property
    def exposes_grad(self) -> bool:
        """Whether ``parameter.grad`` shows the gradients between backward and ``step``."""
        return self._reducer.exposes_grad

    @property
    def has_new_buffers(self) -> bool:
        """Whether a forward pass has written here to a buffer that was not written to before."""
        return self.replica_buffers is not None and self.replica_buffers.wants_agreement

    def scale_loss(self, loss: Tensor) -> Tensor:
        """The loss, times the loss scale."""
        return loss * self.loss_scale

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        """Backward pass of a loss computed by calling the model; the gradient is the mean over the replicas.

        Collective: all replicas, unless inside ``booster.no_sync``.
        """
        self.uninitialized.check()
        if self.failed_pass is None:
            self._run_backward(loss, *args, **kwargs)
            return
        self.failed_pass.finish()
        with self.failed_pass.noted("booster.backward", communicates=self._reducer.is_syncing):
            self._run_backward(loss, *args, **kwargs)

    def _run_backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        if self.stop_exchange is not None:
            self.stop_exchange.begin()
        self.begin_accumulation(manual=True)
        self._reducer.begin_last_backward()
        num_replicas = self.norm.num_replicas
        scaled = self.scale_loss(loss.to(torch.promote_types(loss.dtype, torch.float32))) / num_replicas
        try:
            with self.recompute_context(), self.grad_access_warning.quiet():
                # From the edge: backward of a tensor disables torch's function modes, which recomputation may need.
                torch.autograd.backward(get_gradient_edge(scaled), *args, **kwargs)
        except BaseException:
            # As after an error in execute_pipeline: some buckets are reduced already, and others are not.
            self._reducer.abort()
            raise
        self.end_accumulation()
        if self.statistics is not None and self._reducer.is_syncing:
            self.statistics.average()
        if self.replica_buffers is not None and self._reducer.is_syncing:
            self.replica_buffers.after_backward()
        if self.stop_exchange is not None and self._reducer.is_syncing:
            self.stop_exchange.end()

    def begin_accumulation(self, manual: bool = False) -> None:
        """Prepare for the backward passes of a step; ``manual``: the script runs them."""
        if self._is_released:
            self._refuse_released()
        self.accumulated.begin(self.loss_scale, manual)

    def end_accumulation(self) -> None:
        """Reduce the gradients after the backward passes. Collective: all replicas, unless inside ``no_sync``."""
        self.accumulated.end()

    def gradients(self) -> Iterator[tuple[str, Tensor]]:
        """The gradients of this rank's parameters, by name: copies, unscaled and in fp32.

        Between backward and ``step``, these are the gradients that ``step`` will use; after it, those that it used,
        clipped. Parameters that no backward pass reached are not included.

        Collective: all replicas of this stage, and all ranks that share a parameter with it, if gradients are not
        reduced yet.
        """
        return self.accumulated.tensors()

    def get_grad_norm(self) -> float:
        """The 2-norm of the complete model's gradient, unscaled and before clipping, of the last backward or step.

        Collective: all ranks, unless the norm is known: after a step that needed it (fp16, or ``max_norm`` > 0), and in
        half precision also before such a step. In fp32, the script may have changed gradients before the step.

        Raises:
            ConfigError: it is called inside ``no_sync``.
        """
        self.accumulated.finalize_for("get_grad_norm")
        return self.accumulated.norm()

    @property
    def sends_norm_with_loss(self) -> bool:
        """Whether ``step`` will need the norm: then it is exchanged together with the loss."""
        return self._needs_norm and self._reducer.is_syncing

    def norm_parts(self) -> Tensor:
        """The norms of the gradients that count on this rank, scaled, on the device."""
        return self.norm.parts(self._reducer.gradients)

    def unread_flags(self) -> Tensor:
        """What ``step`` will read of the device besides the norms, if anything, for the caller to read with them."""
        flags = self._reducer.unread_flags()
        return torch.empty(0, dtype=torch.float64) if flags is None else flags.double()

    def take_flags(self, flags: list[float]) -> None:
        """Take over the numbers of :meth:`unread_flags`, if there are any."""
        if flags:
            self._reducer.take_flags(flags)

    def set_norm(self, messages: Sequence[Sequence[float]]) -> None:
        """Set the norm from every rank's message; the result is the same on every rank."""
        self.accumulated.set_norm(messages)

    @property
    def wants_report(self) -> bool:
        """Whether a gradient is inf or NaN and will be reported; the same on every rank."""
        norm = self.accumulated.cached_norm
        return norm is not None and not math.isfinite(norm) and self.nonfinite_steps.wants_search(norm)

    def unscale_grad(self) -> None:
        """Divide the gradients by the loss scale (fp16), for scripts that do so before they clip.

        It is never necessary: :meth:`clip_grad_by_norm`, :meth:`clip_grad_by_value`, :meth:`gradients` and :meth:`step`
        account for the scale, whether or not the gradients still contain it.

        Collective: only if gradients are not reduced yet.

        Raises:
            ConfigError: it is called inside ``no_sync``.
        """
        self.accumulated.finalize_for("unscale_grad")
        self.accumulated.unscale()

    def clip_grad_by_norm(self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False) -> float:
        """Scale the gradients to a global norm of at most ``max_norm``; returns the norm before.

        It replaces ``torch.nn.utils.clip_grad_norm_``, which would use the norm of this rank's gradients only.
        Gradients with an inf or NaN norm are not changed: ``step`` skips or refuses them.

        Args:
            max_norm: the maximum norm.
            norm_type: accepted for compatibility, as 2 only.
            error_if_nonfinite: whether to raise for an inf or NaN norm here already.

        Collective: all ranks.

        Raises:
            ConfigError: it is called inside ``no_sync``, or another ``norm_type`` is requested.
            NonFiniteGradientError: with ``error_if_nonfinite``; raised on all ranks.
        """
        if norm_type != 2.0:
            raise ConfigError(f"only the 2-norm is supported: got norm_type={norm_type}. Leave norm_type out.")
        self.accumulated.finalize_for("clip_grad_by_norm")
        norm = self.accumulated.clip_by_norm(max_norm)
        if error_if_nonfinite and not math.isfinite(norm):
            self.nonfinite_steps.refuse(norm)
        return norm

    def clip_grad_by_value(self, clip_value: float) -> None:
        """Bring every element of the gradients into ``[-clip_value, clip_value]``.

        After an fp16 overflow the gradients are not changed: ``step`` would not recognise a clamped inf.

        Collective: in fp16 like :meth:`get_grad_norm`; else only if gradients are not reduced yet.

        Raises:
            ConfigError: it is called inside ``no_sync``.
        """
        self.accumulated.finalize_for("clip_grad_by_value")
        if not self._scales or math.isfinite(self.accumulated.norm()):
            self.accumulated.clip_by_value(clip_value)

    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]  # no closure, no loss
        """Update the weights. If an fp16 gradient overflowed on any rank, all ranks skip the step and lower the scale.

        In other precisions, a gradient norm that is inf or NaN raises before any weight changes, if the norm is known:
        with ``max_norm``, after ``get_grad_norm`` or ``clip_grad_by_norm``, and always with
        ``error_if_nonfinite=True``. ``error_if_nonfinite=False`` skips such steps instead. In every case the gradients
        are consumed.

        Without a backward pass since the last step, it does nothing.

        Collective: all ranks.

        Raises:
            ConfigError: a closure is given, or it is called inside ``no_sync``.
            NonFiniteGradientError: a gradient is inf or NaN on any rank; raised on all.
        """
        if closure is not None:
            raise ConfigError("step accepts no closure: the schedule runs forward and backward. Call step() alone.")
        if self._is_released:
            self._refuse_released()
        if not self._reducer.is_syncing:
            raise ConfigError("step inside no_sync would make the replicas diverge. Call it after the block.")
        if self._reducer.is_consumed:
            return
        with self.while_updating():
            self._update()

    def _update(self) -> None:
        """Update the weights, or skip the step; the gradients are consumed. Collective: all ranks."""
        self.target.pull()
        self.accumulated.finalize()
        if self.accumulated.num_manual_passes:
            self.accumulated.check_clipping()
        factor = 1.0
        if self._needs_norm or self.accumulated.cached_norm is not None:
            norm = self.accumulated.norm()
            if not math.isfinite(norm):
                self._skip(norm)
                return
            self._count_applied()
            factor = clip_factor(norm, self._max_norm)
        unused = set(self._reducer.unused_parameters())
        with (
            self.target.lent(self._reducer.gradients, unused),
            self.accumulated.used(factor, self._optimizer, self.target),
        ):
            self.target.fetch()
            self._optimizer.step()
        self.target.push()
        self._reducer.consume()
        self.applied_steps += 1

    def _count_applied(self) -> None:
        """Update the loss scale after a step with finite gradients."""
        before = self.loss_scaler.update(overflow=False)
        if self._scales and self.loss_scaler.skipped_steps and not before.settled:
            self.nonfinite_steps.report_found_scale(before.scale)
        self._forget_manual_calls()

    def _skip(self, norm: float) -> None:
        """Skip or refuse the step, and consume its gradients. Collective: all ranks, with the same norm."""
        with self.grad_access_warning.quiet():
            search = None if self.manual_calls is None else self.manual_calls.diagnose
            self.nonfinite_steps.search_manual_calls(search, norm)
        self._forget_manual_calls()
        try:
            self.nonfinite_steps.skip(norm)
        finally:
            self._reducer.consume()

    def _forget_manual_calls(self) -> None:
        if self.manual_calls is not None and self.manual_calls.kept:
            self.manual_calls.forget()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients, and set ``parameter.grad`` to None as torch does; not needed after ``step``."""
        self.accumulated.clear(set_to_none)
        self._forget_manual_calls()

    @property
    def holds_gradients(self) -> bool:  # type: ignore[override]  # an attribute in the base class
        """Whether this rank has gradients of a backward pass since the last step or ``zero_grad``."""
        return self._reducer.has_gradients
