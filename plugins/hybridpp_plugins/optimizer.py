"""The boosted optimizer: reduce, agree, unscale, clip, step."""

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.optim import Optimizer

from hybridpp.config import OptimizerConfig, Precision
from hybridpp.data_parallel import GradientBuckets
from hybridpp.errors import ConfigError
from hybridpp.precision import LossScale, MasterWeights
from hybridpp_plugins.agreed_norm import AgreedNorm
from hybridpp_plugins.own_calls import CannotRepeat, OwnCalls
from hybridpp_plugins.scaling import Scaling
from hybridpp_plugins.unfilled import Unfilled


class HybridOptimizer(Optimizer):
    """Any ``torch.optim`` optimizer on the parameters that this rank owns, or on their fp32 masters.

    One rule for all precisions: ``step`` uses the gradients up. Backward passes add up until the next ``step``, and
    the first one after it starts from zero, whether or not ``zero_grad`` is called.

    In fp32 ``parameter.grad`` is the gradient; in half precision it is None, and :meth:`gradients` has it.

    Attributes:
        applied_steps: steps that were taken.
        unfilled: weights of the model that wait for ``load_model``.
        own_calls: the script's calls of the model, if it makes any.
        again: what the model's forward runs in, for parts of it that activation checkpointing runs again.
        norm: how ranks put the gradient norm together.
        scaling: the loss scale, and the steps it skips.
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
        self.applied_steps = 0
        self.unfilled = Unfilled(())
        self.own_calls: OwnCalls | None = None
        self.again: Callable[[], AbstractContextManager[None]] = nullcontext
        self._optimizer = optimizer
        self._buckets = buckets
        self._masters = masters
        self._targets = {name: masters.masters.get(name, parameter) for name, parameter in parameters.items()}
        self.norm = norm
        self._config = config
        self._scales = precision is Precision.FP16
        self.scaling = Scaling(config.loss_scale, self._scales, norm, buckets)
        self._norm: float | None = None
        # Of the gradients that it is the norm of.
        self._normed: tuple[int, ...] = ()
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
        return self.scaling.state.scale

    @property
    def skipped_steps(self) -> int:
        """Steps left out because a gradient overflowed (fp16)."""
        return self.scaling.skipped_steps

    @property
    def last_step_skipped(self) -> bool:
        """Whether the last step was left out."""
        return self.scaling.last_step_skipped

    @property
    def overflow_report(self) -> str:
        """Where the last overflow came from, as far as it was looked for; "" before one."""
        return self.scaling.report

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
        self.begin_accumulation(by_hand=True)
        self._buckets.last_backward()
        num_replicas = self.norm.num_replicas
        scaled = self.scale_loss(loss.float()) / num_replicas
        with self.again():
            # From the edge: backward of a tensor takes torch's function modes away, which recomputation may need.
            torch.autograd.backward(get_gradient_edge(scaled), *args, **kwargs)
        self._buckets.finish()

    def begin_accumulation(self, by_hand: bool = False) -> None:
        """Called before the backward passes of a step; ``by_hand``: the script runs them."""
        self.scaling.begin(by_hand)
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
        self._settle()
        unused = set(self._buckets.unused())
        held = [(name, gradient) for name, gradient in self._buckets.gradients.items() if name not in unused]
        return ((name, gradient / self._held_scale) for name, gradient in held)

    def get_grad_norm(self) -> float:
        """The 2-norm of the whole model's gradient, unscaled and before clipping, as of the last backward or step.

        Collective: all ranks, unless it is known: behind a step that needed it (fp16, or ``max_norm`` > 0), and in half
        precision before one, too. In fp32, users may change gradients before it.
        """
        self._settle()
        return self._agreed_norm()

    def _settle(self) -> None:
        """Have the gradients as ``step`` will use them: what was set from outside, and summed."""
        self._buckets.adopt()
        self._buckets.finish()

    def _agreed_norm(self) -> float:
        if self._norm is None or self._changed_anywhere():
            self.take_norms(self.norm.gather(self._buckets.gradients))
        assert self._norm is not None
        return self._norm

    def _changed_anywhere(self) -> bool:
        """Whether a user has written to gradients since the norm was taken, on any rank. Reads no device."""
        if not self._buckets.visible or self._buckets.is_consumed:
            return False
        mine = torch.tensor(self._normed != self._buckets.version)
        return any(bool(changed) for changed in self.norm.control.all_gather(mine))

    @property
    def tells_norm_early(self) -> bool:
        """Whether ``step`` will need the norm: then the ranks tell it each other together with the loss."""
        return self._needs_norm and self._buckets.is_syncing

    @property
    def _needs_norm(self) -> bool:
        return self._scales or self._config.max_norm > 0

    def norm_parts(self) -> Tensor:
        """The norms of the gradients that count on this rank, scaled, still on the device."""
        return self.norm.parts(self._buckets.gradients)

    def take_norms(self, rows: list[Tensor]) -> None:
        """Take over every rank's norms, as messages of ``norm``; the same on every rank."""
        self._set_norm(self.norm.total(rows) / self._held_scale)

    def _set_norm(self, norm: float) -> None:
        self._norm, self._normed = norm, self._buckets.version

    @property
    def wants_report(self) -> bool:
        """Whether the step is known to be skipped, and that will be told; the same on every rank."""
        return self.scaling.wants_search(self._norm)

    def clip_grad_by_norm(self, max_norm: float) -> float:
        """Scale the gradients down to a global norm of at most ``max_norm``; returns the norm before. Collective."""
        norm = self.get_grad_norm()
        factor = _clip_factor(norm, max_norm)
        self._buckets.scale(factor)
        self._set_norm(norm * factor)
        return norm

    def clip_grad_by_value(self, clip_value: float) -> None:
        """Bring every element of the gradients into ``[-clip_value, clip_value]``.

        Where fp16 overflowed they stay: a clamped inf is a number, and ``step`` would take it for one.

        Collective: as :meth:`get_grad_norm` in fp16; else only where gradients are still to be reduced.
        """
        self._settle()
        if self._scales and self.scaling.is_overflow(self._agreed_norm()):
            return
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
        self._masters.from_working()
        self._settle()
        factor = 1.0 / self._held_scale
        if self._needs_norm:
            norm = self._agreed_norm()
            if self._scales and self._is_skipped(norm):
                self._buckets.consume()
                return
            factor *= _clip_factor(norm, self._config.max_norm)
        self._buckets.scale(factor)
        self._held_scale = 1.0
        with self._lent_gradients():
            self._optimizer.step()
        self._masters.to_working()
        self._buckets.consume()
        self.applied_steps += 1

    def _is_skipped(self, norm: float) -> bool:
        """The end of an fp16 step: whether to skip it. Collective: all ranks, with the same norm."""
        if self.own_calls is not None:
            if self.wants_report and self.scaling.is_by_hand:
                try:
                    self.scaling.found(self.own_calls.examine(), by_hand=True)
                except CannotRepeat as reason:
                    self.scaling.not_found(str(reason))
            self.own_calls.forget()
        return self.scaling.step(norm)

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
        """Forget the gradients, and as torch set ``parameter.grad`` to None; not needed after ``step``."""
        self._buckets.zero(set_to_none)
        self.scaling.forget()
        if self.own_calls is not None:
            self.own_calls.forget()
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
            "loss_scale": vars(self.scaling.state).copy(),
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
        self.scaling.state = LossScale(**state_dict["loss_scale"])
        for name, master in self._masters.masters.items():
            master.copy_(state_dict["masters"][name])
        self._masters.to_working()


def _clip_factor(norm: float, max_norm: float) -> float:
    # As torch.nn.utils.clip_grad_norm_: the same small term keeps the two equal.
    if max_norm <= 0 or math.isnan(norm):
        return norm if math.isnan(norm) else 1.0
    return min(1.0, max_norm / (norm + 1e-6))
