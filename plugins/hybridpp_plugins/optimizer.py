"""The boosted optimizer: reduce, agree, unscale, clip, step."""

import logging
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from hybridpp.cluster import Group, get_dist_logger
from hybridpp.config import OptimizerConfig, Precision
from hybridpp.data_parallel import GradientBuckets
from hybridpp.errors import ConfigError
from hybridpp.optim import norms, total_norm
from hybridpp.precision import LossScale, MasterWeights, after_step
from hybridpp_plugins.unfilled import Unfilled


@dataclass(frozen=True)
class NormPlan:
    """How the ranks put the global gradient norm together.

    Attributes:
        control: all ranks of the world.
        ranks: those of one replica, whose parts make up the norm.
        counted: this rank's parameters that count here; one that several stages hold counts once.
        width: the most parameters that any rank counts.
    """

    control: Group
    ranks: tuple[int, ...]
    counted: tuple[str, ...]
    width: int


class HybridOptimizer(Optimizer):
    """Any ``torch.optim`` optimizer on the parameters that this rank owns, or on their fp32 masters.

    One rule for all precisions: ``step`` uses the gradients up. Backward passes add up until the next ``step``, and
    the first one after it starts from zero, whether or not ``zero_grad`` is called.

    Attributes:
        skipped_steps: steps left out because a gradient overflowed (fp16).
        applied_steps: steps that were taken.
        last_step_skipped: whether the last one was.
        unfilled: weights of the model that wait for ``load_model``.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        buckets: GradientBuckets,
        masters: MasterWeights,
        parameters: Mapping[str, nn.Parameter],
        norm_plan: NormPlan,
        config: OptimizerConfig,
        precision: Precision,
    ):
        # No call to the base class: groups and state are the wrapped optimizer's.
        self.skipped_steps = 0
        self.applied_steps = 0
        self.last_step_skipped = False
        self.unfilled = Unfilled(())
        self._optimizer = optimizer
        self._buckets = buckets
        self._masters = masters
        self._targets = {name: masters.masters.get(name, parameter) for name, parameter in parameters.items()}
        self._norm_plan = norm_plan
        self._config = config
        self._scales = precision is Precision.FP16
        self._state = LossScale(config.loss_scale.initial_scale if self._scales else 1.0)
        self._norm: float | None = None

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
        self._norm = None
        self._buckets.begin()
        self._buckets.last_backward()
        num_replicas = self._norm_plan.control.size // len(self._norm_plan.ranks)
        torch.autograd.backward(self.scale_loss(loss.float()) / num_replicas, *args, **kwargs)
        self._buckets.finish()

    def begin_accumulation(self) -> None:
        """Called before the backward passes of a pipeline step."""
        self._norm = None
        self._buckets.begin()

    def get_grad_norm(self) -> float:
        """The 2-norm of the whole model's gradient, unscaled and before clipping, as of the last backward or step.

        Collective: all ranks, unless ``step`` already computed it (fp16, or ``max_norm`` > 0).
        """
        if self._norm is None:
            self._buckets.finish()
            self._norm = self._agreed_norm() / self.loss_scale
        return self._norm

    def _agreed_norm(self) -> float:
        """The norm over all ranks of the scaled gradients, or inf or NaN, the same on every rank."""
        plan = self._norm_plan
        parts = norms([self._buckets.gradients[name] for name in plan.counted])
        padded = torch.zeros(plan.width, dtype=torch.float64)
        padded[: parts.numel()] = parts
        rows = plan.control.all_gather(padded)
        values = torch.stack(rows)
        if not bool(torch.isfinite(values).all()):
            return math.nan if bool(values.isnan().any()) else math.inf
        return total_norm(part for rank in plan.ranks for part in rows[rank].tolist())

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
        self._buckets.clamp(clip_value * self.loss_scale)
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
        factor = 1.0 / self.loss_scale
        if self._scales or self._config.max_norm > 0:
            norm = self.get_grad_norm()
            if self._scales and self._skip_on_overflow(not math.isfinite(norm)):
                return
            factor *= _clip_factor(norm, self._config.max_norm)
        self._buckets.scale(factor)
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
            self.skipped_steps += 1
            self._buckets.consume()
            # The first one, and then ever more rarely: 10, 100, …
            level = logging.WARNING if math.log10(self.skipped_steps).is_integer() else logging.DEBUG
            get_dist_logger().log(
                level,
                f"a gradient overflowed in fp16: step skipped, loss scale {before.scale:g} -> {self._state.scale:g} "
                f"({self.skipped_steps} steps so far, see optimizer.skipped_steps)",
                ranks=[0],
            )
        return overflow

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
