"""The boosted optimizer: what a script calls beside its steps."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from hybridpp.cluster import gather_numbers
from hybridpp.config import OptimizerConfig, Precision
from hybridpp.data_parallel import GradientChecks, GradientReducer, RunningStatistics, UpdateTarget
from hybridpp.errors import ConfigError
from hybridpp.nn import walk
from hybridpp.nn.torch_private import is_in_running_backward
from hybridpp.optim import GlobalGradNorm
from hybridpp.partition.compiled import is_compiled_by_script
from hybridpp.precision import MasterWeights
from hybridpp_plugins.failed_pass import FailedPass
from hybridpp_plugins.manual_loss import ManualLosses
from hybridpp_plugins.optimizer_methods import Written, is_own_method, refuse_hidden_gradients
from hybridpp_plugins.optimizer_state import OptimizerStateOwner
from hybridpp_plugins.optimizer_step import SteppingOptimizer
from hybridpp_plugins.stop_exchange import StopExchange
from hybridpp_plugins.uninitialized import UninitializedWeights
from hybridpp_plugins.weights_in_loss import WeightsInLoss


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


class HybridOptimizer(SteppingOptimizer):
    """Any ``torch.optim`` optimizer, on the parameters that this rank owns or on their fp32 masters.

    In every precision, backward passes accumulate gradients until ``step``, which consumes them: the next backward pass
    starts from zero, whether or not ``zero_grad`` is called.

    In fp32 ``parameter.grad`` is the gradient. In half precision and with ZeRO it can be set to None between backward
    and ``step``, but not be read; :meth:`gradients` returns it.

    Attributes:
        uninitialized: weights of the model that have no values yet.
        recompute_context: a context for the backward pass, in which activation checkpointing may run the forward again.
        partners: gives the other optimizers that the plugin boosted, whose models a loss may go through, too.
        own_backward: a context for a backward pass of the script's own, which may be of several calls of the model.
        finish_calls: takes part, before such a pass, in calls of the model that other replicas make.
        groups_before: what its groups had before boost.
        statistics: running statistics of the model; None: it has none.
        stop_exchange: tells all ranks of signals in the script's own backward passes.
        gradient_checks: finds code that makes of gradients what depends on the layout; None: nothing is checked.
        failed_pass: notes errors in the script's own passes; None: there is one rank.
        manual_losses: weighs the losses of the script's own passes; None: there is one replica.
        weights_in_loss: refuses losses of such passes that read weights; None: each rank has all weights.
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
        super().__init__(optimizer, reducer, target, masters, norm, config, precision, owner)
        self.uninitialized = UninitializedWeights(())
        self.recompute_context: Callable[[], AbstractContextManager[None]] = nullcontext
        self.own_backward: Callable[[], AbstractContextManager[None]] = nullcontext
        self.finish_calls: Callable[[], None] = _nothing
        self.partners: Callable[[], Sequence[HybridOptimizer]] = tuple
        self.groups_before: Sequence[GroupBefore] = ()
        self.statistics: RunningStatistics | None = None
        self.stop_exchange: StopExchange | None = None
        self.gradient_checks: GradientChecks | None = None
        # Hooks of all kinds are numbered.
        self._last_hook = 0
        self.failed_pass: FailedPass | None = None
        self.manual_losses: ManualLosses | None = None
        self.weights_in_loss: WeightsInLoss | None = None

    @property
    def overflow_report(self) -> str:
        """The source of the last inf or NaN in a gradient, as far as it was searched; "" before the first one."""
        return self.nonfinite_steps.report

    @property
    def exposes_grad(self) -> bool:
        """Whether ``parameter.grad`` shows the gradients between backward and ``step``."""
        return self._reducer.exposes_grad

    @property
    def gradient_scale(self) -> float:
        """The factor on a loss in :meth:`backward`: the loss scale, over the replicas whose mean is taken."""
        return self.loss_scale / self.norm.num_replicas * self.hook_factor

    @property
    def hook_factor(self) -> float:
        """By which the gradient is multiplied that something on trial is given now, see :class:`GradientChecks`."""
        return 1.0 if self.gradient_checks is None else self.gradient_checks.read_factor()

    def checked_call(self, model: nn.Module) -> AbstractContextManager[None]:
        """A context for the script's own calls of the model, in which hooks are found until its first backward pass."""
        checks = self.gradient_checks
        number = self.applied_steps + 1
        is_tried_again = number > 2 and not number & (number - 1)  # as in steps of the engine
        if checks is not None and (RemovableHandle.next_id != self._last_hook or is_tried_again):
            checks.look(again=is_tried_again)
        if checks is None or not checks.is_first or self.norm.num_replicas == 1 or not torch.is_grad_enabled():
            return nullcontext()
        if any(map(is_compiled_by_script, walk.modules(model))):  # it would be traced with what watches
            return nullcontext()
        return checks.watching_forward()

    def scale_loss(self, loss: Tensor) -> Tensor:
        """The loss, times the loss scale."""
        return loss * self.loss_scale

    def backward(self, loss: Tensor, *args: Any, num_items: Any = None, **kwargs: Any) -> None:
        """Backward pass of a loss computed by calling the model; see :meth:`hybridpp.Booster.backward`.

        Collective: all replicas.
        """
        self.uninitialized.check()
        self.check_gradients_before_boost()
        if self.interruption.cause is not None:
            self.interruption.refuse()
        if self.failed_pass is None:
            self._run_backward(loss, num_items, *args, **kwargs)
            return
        self.failed_pass.finish()
        communicates = self._reducer.is_syncing or self.manual_losses is not None
        with self.on_plain_weights(), self.failed_pass.noted("booster.backward", communicates=communicates):
            self._run_backward(loss, num_items, *args, **kwargs)

    def _run_backward(self, loss: Tensor, num_items: Any, *args: Any, **kwargs: Any) -> None:
        partners = self.partners()
        for one in (self, *partners):
            one.finish_calls()
        for one in (self, *partners):
            if one.weights_in_loss is not None:
                one.weights_in_loss.check(loss)
        if self.stop_exchange is not None:
            self.stop_exchange.begin()
        self._begin_own(self.loss_scale)
        num_replicas = self.norm.num_replicas
        scaled = self.scale_loss(loss.to(torch.promote_types(loss.dtype, torch.float32))) / num_replicas
        joined: list[HybridOptimizer] = []
        checks: list[GradientChecks] = []
        # Passes end before gradients are reduced.
        passes = ExitStack()
        with ExitStack() as stack:

            def join(_: Any) -> None:
                # At the beginning of the pass, which only then is known to reach them.
                for one in (other for other in partners if other.is_reached()):
                    one._begin_own(self.loss_scale)
                    passes.enter_context(one.own_backward())
                    joined.append(one)

            if partners and scaled.grad_fn is not None:
                scaled.grad_fn.register_prehook(join)
            try:
                for one in (self, *partners):
                    stack.enter_context(one.recompute_context())
                    has_hooks, in_parts = one._reducer.has_hooks, num_replicas > 1
                    is_checked = has_hooks or (one.gradient_checks and one.gradient_checks.is_first and in_parts)
                    if one.gradient_checks is not None and is_checked:
                        stack.enter_context(one.gradient_checks.watching(has_hooks=has_hooks, in_parts=in_parts))
                        checks.append(one.gradient_checks)
                if self.manual_losses is not None:
                    is_syncing = self._reducer.is_syncing
                    stack.enter_context(self.manual_losses.weighed(loss, num_items, is_syncing=is_syncing))
                # From the edge: backward of a tensor disables torch's function modes, which recomputation may need.
                edge = get_gradient_edge(scaled)
                if checks:
                    stack.enter_context(checks[0].trying([edge.node]))
                with passes:
                    passes.enter_context(self.own_backward())
                    torch.autograd.backward(edge, *args, **kwargs)
                refusals = [one.refusal() for one in checks]
                if any(refusals):
                    raise ConfigError(next(filter(None, refusals)))
            except BaseException:
                # As after an error in execute_pipeline: some buckets are reduced already, and others are not.
                for one in (self, *joined):
                    one._reducer.abort()
                raise
            for one in (self, *joined):
                one._end_own()
                one._last_hook = RemovableHandle.next_id  # passes put hooks on tensors, too
        if self.stop_exchange is not None and self._reducer.is_syncing:
            self.stop_exchange.end()

    def is_reached(self) -> bool:
        """Whether the backward pass that runs will reach a parameter of this optimizer."""
        return any(is_in_running_backward(parameter) for parameter in self._reducer.parameters.values())

    def _begin_own(self, loss_scale: float) -> None:
        """Prepare for a backward pass that the script runs, of a loss times ``loss_scale``."""
        if self._is_released:
            self._refuse_released()
        if self.target.is_divided:  # this pass, or its forward, has read other weights than a step would update
            self.target.take_over()
        self.accumulated.begin(loss_scale, manual=True)
        self._reducer.begin_last_backward()

    def _end_own(self) -> None:
        """Reduce after such a pass. Collective: all replicas, unless inside ``no_sync``."""
        self.end_accumulation()
        if self.statistics is not None and self._reducer.is_syncing:
            self.statistics.average()
        if self.replica_buffers is not None and self._reducer.is_syncing:
            self.replica_buffers.after_backward()
        if self.modes is not None:
            self.modes.passed()

    def gradients(self) -> Iterator[tuple[str, Tensor]]:
        """The gradients of this rank's parameters, by name: copies, unscaled and in fp32.

        Between backward and ``step``, these are the gradients that ``step`` will use; after it, those that it used,
        clipped. Parameters that no backward pass reached are not included.

        Collective: all replicas of this stage, and all ranks that share a parameter with it, if gradients are not
        reduced yet.
        """
        with self._communicating("gradients()"):
            return self.accumulated.tensors()

    def get_grad_norm(self) -> float:
        """The 2-norm of the complete model's gradient, unscaled and before clipping, of the last backward or step.

        After ``zero_grad`` it is that of the last step, until the next backward pass.

        Collective: all ranks, unless the norm is known: after a step that needed it (fp16, or ``max_norm`` > 0), and in
        half precision also before such a step. In fp32, the script may have changed gradients before the step.

        Raises:
            ConfigError: it is called inside ``no_sync``; or after ``zero_grad(set_to_none=False)``, if the step did not
                need it.
        """
        with self._communicating("get_grad_norm()"):
            if (last := self.accumulated.norm_of_last_step()) is not None:
                return last
            self.accumulated.finalize_for("get_grad_norm")
            return self.accumulated.norm()

    def unscale_grad(self) -> None:
        """Divide the gradients by the loss scale (fp16), for scripts that do so before they clip.

        It is never necessary: :meth:`clip_grad_by_norm`, :meth:`clip_grad_by_value`, :meth:`gradients` and :meth:`step`
        account for the scale, whether or not the gradients still contain it.

        Collective: only if gradients are not reduced yet.

        Raises:
            ConfigError: it is called inside ``no_sync``.
        """
        with self._communicating("unscale_grad()"):
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
        with self._communicating("clip_grad_by_norm()"):
            self.accumulated.finalize_for("clip_grad_by_norm")
            norm = self.accumulated.clip_by_norm(max_norm)
        self._note_call(f"clip_grad_by_norm({float(max_norm):g})")
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
        with self._communicating("clip_grad_by_value()"):
            self.accumulated.finalize_for("clip_grad_by_value")
            is_finite = not self._scales or math.isfinite(self.accumulated.norm())
        self._note_call(f"clip_grad_by_value({float(clip_value):g})")
        if is_finite:
            self.accumulated.clip_by_value(clip_value)

    def __getattr__(self, name: str) -> Any:
        attribute = super().__getattr__(name)
        return partial(self._call_own, name, attribute) if is_own_method(name, attribute) else attribute

    def _call_own(self, name: str, method: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Call a method of the wrapped optimizer, and bring what it has written into the model's weights.

        Between backward and ``step`` it finds gradients where this rank has all of them.

        Collective: all ranks, if replicas divide the update (ZeRO), or if gradients are not reduced yet.

        Raises:
            ConfigError: it has written, or raised, where it could not see gradients that wait for a step.
        """
        if self._is_released:
            self._refuse_released()
        with self._communicating(f"{name}()"):
            self.target.pull()
            gradients, unused = self._gradients_to_lend()
            before = Written.of(self.target.tensors)
            with nullcontext() if gradients is None else self.target.lent(gradients, unused):
                if gradients is not None:
                    self.target.fetch()
                try:
                    result = method(*args, **kwargs)
                except Exception as error:
                    if gradients is None and self.holds_gradients:
                        refuse_hidden_gradients(self._optimizer, name, self._why_hidden(), error)
                    raise
                drops = gradients is not None and all(one.grad is None for one in self.target.tensors.values())
            if drops and self.holds_gradients:
                self.zero_grad()
            if self._wrote_anywhere(name, Written.of(self.target.tensors) != before):
                if gradients is None and self.holds_gradients:
                    refuse_hidden_gradients(self._optimizer, name, self._why_hidden())
                self.target.push()
                self.calls.note(f"{name}()")
            elif not self.target.tensors and not self.owner.is_divided:  # nothing here shows whether it writes
                self.calls.miss()
        return result

    def _wrote_anywhere(self, name: str, here: bool) -> bool:
        """Whether a method has written here, or, where replicas gather what each of them has, on any rank."""
        if not self.owner.is_divided:
            return here
        call = f"in optimizer.{name}, after which replicas gather what it has written"
        return any(wrote for (wrote,) in gather_numbers(self.norm.control, call, [float(here)]))

    def _gradients_to_lend(self) -> tuple[Mapping[str, Tensor] | None, set[str]]:
        """The gradients that a method of the wrapped optimizer may read, and the names of those that are none.

        None: there are none, or this rank has only a part of them.
        """
        if not self.holds_gradients or self._why_hidden():
            return None, set()
        self.accumulated.finalize()
        return self._reducer.gradients, set(self._reducer.unused_parameters())

    def _why_hidden(self) -> str:
        """Why this rank cannot show an optimizer all gradients between backward and step; empty: it can."""
        if self._scales:
            return "in fp16 they contain the loss scale"
        if not self._reducer.is_syncing:
            return "inside no_sync each replica has its own"
        return "ranks divide them (ZeRO, tp_size, pp_size)" if len(self.norm.ranks) > 1 else ""

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients, and set ``parameter.grad`` to None as torch does; not needed after ``step``."""
        self._note_call("zero_grad()")
        with self.on_plain_weights():
            self.accumulated.clear(set_to_none)
        self._forget_manual_calls()
        for parameter in self.held_before.values():
            parameter.grad = None
        self.held_before = {}

    @property
    def holds_gradients(self) -> bool:  # type: ignore[override]  # an attribute in the base class
        """Whether this rank has gradients of a backward pass since the last step or ``zero_grad``."""
        return self._reducer.has_gradients


def _nothing() -> None:
    pass
