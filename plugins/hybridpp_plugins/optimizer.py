"""The boosted optimizer: reduce, agree, unscale, clip, step."""

import logging
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from hybridpp.cluster import get_dist_logger
from hybridpp.config import OptimizerConfig, Precision
from hybridpp.data_parallel import GradientBuckets
from hybridpp.errors import ConfigError
from hybridpp.precision import LossScale, MasterWeights, after_step
from hybridpp_plugins.agreed_norm import AgreedNorm
from hybridpp_plugins.unfilled import Unfilled


class HybridOptimizer(Optimizer):
    """Any ``torch.optim`` optimizer on the parameters that this rank owns, or on their fp32 masters.

    One rule for all precisions: ``step`` uses the gradients up. Backward passes add up until the next ``step``, and
    the first one after it starts from zero, whether or not ``zero_grad`` is called.

    In fp32 ``parameter.grad`` is the gradient; in half precision it is None, and :meth:`gradients` has it.

    Attributes:
        skipped_steps: steps left out because a gradient overflowed (fp16).
        applied_steps: steps that were taken.
        last_step_skipped: whether the last one was.
        unfilled: weights of the model that wait for ``load_model``.
        norm: how ranks put the gradient norm together.
        overflow_report: where the last overflow came from, as far as it was looked for; "" before one.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        buckets: GradientBuckets,
        masters: MasterWeights,
        parameters: Mapping[str, nn.Parameter],
        norm: AgreedNorm,
        config: OptimizerConfig,
        precision: Precision,
    ):
        # No call to the base class: groups and state are the wrapped optimizer's.
        self.skipped_steps = 0
        self.applied_steps = 0
        self.last_step_skipped = False
        self.unfilled = Unfilled(())
        self.overflow_report = ""
        self._optimizer = optimizer
        self._buckets = buckets
        self._masters = masters
        self._targets = {name: masters.masters.get(name, parameter) for name, parameter in parameters.items()}
        self.norm = norm
        self._config = config
        self._scales = precision is Precision.FP16
        self._half = precision is not Precision.FP32
        self._state = LossScale(config.loss_scale.initial_scale if self._scales else 1.0)
        self._norm: float | None = None
        self._reported = False
        # What the gradients that are held are multiplied by.
        self._held_scale = 1.0

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]  # an attribute in the base class
        """The wrapped optimizer's groups."""
        return self._optimizer.param_groups

    @property
    def state(self) -> Any:  # type: ignore[override]  # an attribute in the base class
        """The wrapped optimizer's state."""
        return self._optimizer.state

    @property
    def defaults(self) -> dict[str, Any]:  # type: ignore[override]  # an attribute in the base class
        """The wrapped optimizer's defaults."""
        return self._optimizer.defaults

    @property
    def loss_scale(self) -> float:
        """Factor on the loss in the backward pass; 1 unless fp16."""
        return self._state.scale

    def unwrap(self) -> Optimizer:
        """The optimizer that was given to ``boost``."""
        return self._optimizer

    def scale_loss(self, loss: Tensor) -> Tensor:
        """The loss, times the loss scale."""
        return loss * self.loss_scale

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        """Backward pass of a loss computed by calling the model; the gradient is the mean over the replicas.

        Collective: all replicas, unless inside ``booster.no_sync``.
        """
        self.unfilled.check()
        self.begin_accumulation()
        self._buckets.last_backward()
        num_replicas = self.norm.num_replicas
        torch.autograd.backward(self.scale_loss(loss.float()) / num_replicas, *args, **kwargs)
        self._buckets.finish()

    def begin_accumulation(self) -> None:
        """Called before the backward passes of a pipeline step."""
        self._norm = None
        self._held_scale = self.loss_scale
        self._buckets.begin()

    def gradients(self) -> Iterator[tuple[str, Tensor]]:
        """The gradients of the parameters that this rank holds, by name: copies, unscaled and in fp32.

        Between backward and ``step``, what ``step`` will use; behind it, what it used, clipped. A parameter that no
        backward pass reached has none.

        Collective: all replicas of this stage, and all ranks that share a parameter with it, if gradients are still
        to be reduced.
        """
        self._buckets.finish()
        unused = set(self._buckets.unused())
        held = [(name, gradient) for name, gradient in self._buckets.gradients.items() if name not in unused]
        return ((name, gradient / self._held_scale) for name, gradient in held)

    def get_grad_norm(self) -> float:
        """The 2-norm of the whole model's gradient, unscaled and before clipping, as of the last backward or step.

        Collective: all ranks, unless it is known already (fp16, or ``max_norm`` > 0).
        """
        if self._norm is None:
            self._buckets.finish()
            self.take_norms(self.norm.gather(self._buckets.gradients))
        assert self._norm is not None
        return self._norm

    @property
    def tells_norm_early(self) -> bool:
        """Whether ``step`` will need the norm, and nobody can change the gradients before without the optimizer.

        Then the ranks tell it each other together with the loss. In fp32, users may write to ``parameter.grad``.
        """
        return self._half and self._needs_norm and self._buckets.is_syncing

    @property
    def _needs_norm(self) -> bool:
        return self._scales or self._config.max_norm > 0

    def norm_parts(self) -> Tensor:
        """The norms of the gradients that count on this rank, scaled, still on the device."""
        return self.norm.parts(self._buckets.gradients)

    def take_norms(self, rows: list[Tensor]) -> None:
        """Take over every rank's norms, as messages of ``norm``; the same on every rank."""
        self._norm = self.norm.total(rows) / self._held_scale

    @property
    def wants_report(self) -> bool:
        """Whether the step is known to be skipped, and that will be told; the same on every rank."""
        overflow = self._scales and self._norm is not None and not math.isfinite(self._norm)
        return overflow and self.will_warn and not self._reported

    def report_overflow(self, text: str) -> None:
        """Take down where an overflow came from."""
        self.overflow_report, self._reported = text, True

    @property
    def will_warn(self) -> bool:
        """Whether the next skipped step is told: the first one, and then ever more rarely: 10, 100, …"""
        return math.log10(self.skipped_steps + 1).is_integer()

    def clip_grad_by_norm(self, max_norm: float) -> float:
        """Scale the gradients down to a global norm of at most ``max_norm``; returns the norm before. Collective."""
        norm = self.get_grad_norm()
        factor = _clip_factor(norm, max_norm)
        self._buckets.scale(factor)
        self._norm = norm * factor
        return norm

    def clip_grad_by_value(self, clip_value: float) -> None:
        """Bring every element of the gradients into ``[-clip_value, clip_value]``. Collective if still unreduced."""
        self._buckets.finish()
        self._buckets.clamp(clip_value * self._held_scale)
        self._norm = None

    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]  # no closure, no loss
        """Update the weights; where an fp16 gradient overflowed, all ranks leave them alone and lower the scale.

        Collective: all ranks.

        Without a backward pass since the last step there is nothing to use: the weights stay.

        Raises:
            ConfigError: a closure is given, or it is called inside ``no_sync``.
        """
        if closure is not None:
            raise ConfigError("step takes no closure: the schedule runs forward and backward. Call step() alone.")
        if not self._buckets.is_syncing:
            raise ConfigError("step inside no_sync would let the replicas drift apart. Call it behind the block.")
        if self._buckets.is_consumed:
            return
        self._buckets.adopt()
        self._masters.from_working()
        self._buckets.finish()
        factor = 1.0 / self._held_scale
        if self._needs_norm:
            norm = self.get_grad_norm()
            if self._scales and self._skip_on_overflow(not math.isfinite(norm)):
                return
            factor *= _clip_factor(norm, self._config.max_norm)
        self._buckets.scale(factor)
        self._held_scale = 1.0
        with self._lent_gradients():
            self._optimizer.step()
        self._masters.to_working()
        self._buckets.consume()
        self.applied_steps += 1

    def _skip_on_overflow(self, overflow: bool) -> bool:
        before = self._state
        self._state = after_step(before, overflow, self._config.loss_scale)
        self.last_step_skipped = overflow
        if overflow:
            self._tell_skipped(before.scale)
            self.skipped_steps += 1
            self._buckets.consume()
        elif not before.settled and self.skipped_steps:
            get_dist_logger().warning(
                f"the loss scale was found: {before.scale:g}, after {self.skipped_steps} skipped steps. Pass "
                f"initial_scale={before.scale:g} to keep them.",
                ranks=[0],
            )
        return overflow

    def _tell_skipped(self, scale: float) -> None:
        if not self._reported:
            self.overflow_report = (
                f"not looked for; on this rank: {', '.join(self.norm.not_finite(self._buckets.gradients)) or 'none'}"
            )
        self._reported = False
        floor = scale == self._config.loss_scale.min_scale
        get_dist_logger().log(
            logging.WARNING if self.will_warn else logging.DEBUG,
            f"a gradient overflowed in fp16: step skipped, loss scale {scale:g} -> {self._state.scale:g}"
            f"{', the least that min_scale allows' if floor else ''} "
            f"({self.skipped_steps + 1} steps so far, see optimizer.skipped_steps). "
            f"The first inf or NaN: {self.overflow_report}",
            ranks=[0],
        )

    @contextmanager
    def _lent_gradients(self) -> Iterator[None]:
        """For the step, every target's ``grad`` is its gradient; as in torch None where no backward pass reached it."""
        unused = set(self._buckets.unused())
        before = {name: target.grad for name, target in self._targets.items()}
        for name, target in self._targets.items():
            target.grad = None if name in unused else self._buckets.gradients[name]
        try:
            yield
        finally:
            for name, target in self._targets.items():
                target.grad = before[name]

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients; not needed after ``step``."""
        self._buckets.zero()
        self._norm = None

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refused: what a rank owns is settled at boost."""
        raise ConfigError("parameter groups are added before booster.boost. Add this one to the optimizer first.")

    def __getattr__(self, name: str) -> Any:
        # Hooks, and whatever else the wrapped optimizer has.
        if name == "_optimizer":
            raise AttributeError(name)
        return getattr(self._optimizer, name)

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise ConfigError("a boosted optimizer cannot be copied or pickled. Take its state_dict().")

    def state_dict(self) -> dict[str, Any]:
        """This rank's optimizer state, loss scale and masters."""
        return {
            "optimizer": self._optimizer.state_dict(),
            "loss_scale": vars(self._state).copy(),
            "masters": {name: master.detach() for name, master in self._masters.masters.items()},
        }

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Set what ``state_dict`` gave on the same rank of the same layout."""
        missing = set(self._masters.masters) - set(state_dict.get("masters", {}))
        if missing:
            raise ConfigError(
                f"this state belongs to another layout or precision: it has no master of {min(missing)!r}. "
                "Load it on the same rank of the same layout."
            )
        self._optimizer.load_state_dict(state_dict["optimizer"])
        self._state = LossScale(**state_dict["loss_scale"])
        for name, master in self._masters.masters.items():
            master.copy_(state_dict["masters"][name])
        self._masters.to_working()


def _clip_factor(norm: float, max_norm: float) -> float:
    # As torch.nn.utils.clip_grad_norm_: the same small term keeps the two equal.
    if max_norm <= 0 or math.isnan(norm):
        return norm if math.isnan(norm) else 1.0
    return min(1.0, max_norm / (norm + 1e-6))
