"""Learning-rate schedules that warm up and then decay over a known number of steps."""

import math
from dataclasses import dataclass

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from hybridpp.errors import ConfigError


@dataclass
class _LinearFactor:
    """What a group's base learning rate is multiplied by at a step: up to 1, then down to ``end``.

    An object, not a function, because ``LambdaLR.state_dict`` saves the attributes of objects and drops functions.
    """

    total_steps: int
    warmup_steps: int
    end: float = 0.0

    def __call__(self, step: int) -> float:
        if step >= self.total_steps:
            return self.end
        if step < self.warmup_steps:
            return (step + 1) / (self.warmup_steps + 1)
        progress = (step - self.warmup_steps) / (self.total_steps - self.warmup_steps)
        return self.end + (1.0 - self.end) * self.decay(progress)

    def decay(self, progress: float) -> float:
        """The part of the way down still to go, 1 to 0, while ``progress`` runs from 0 to 1."""
        return 1.0 - progress


class _CosineFactor(_LinearFactor):
    def decay(self, progress: float) -> float:
        return 0.5 * (1.0 + math.cos(math.pi * progress))


class CosineAnnealingWarmupLR(LambdaLR):
    """Linear warm-up to each group's own learning rate, then half a cosine down to ``eta_min``.

    With base learning rate ``lr``, step ``s`` counted from 0, ``w = warmup_steps`` and ``t = total_steps``::

        s < w        lr * (s + 1) / (w + 1)                     (the first step is not zero)
        w <= s < t   eta_min + (lr - eta_min) * (1 + cos(pi * (s - w) / (t - w))) / 2
        s >= t       eta_min

    Like torch's schedulers, ``load_state_dict`` brings back the saved schedule, ``total_steps`` included. To resume on
    a longer one, build the scheduler with the new ``total_steps`` and ``last_epoch`` instead of loading its state.

    Args:
        optimizer: its groups may have different learning rates.
        total_steps: number of scheduler steps to the end of the decay, warm-up included.
        warmup_steps: steps below the base learning rate; 0 for none, ``total_steps`` for warm-up only.
        eta_min: learning rate at the end, absolute, the same for every group.
        last_epoch: index of the last step done, to resume without a state dict; -1 starts afresh.

    Raises:
        ConfigError: ``total_steps`` is below 1, ``warmup_steps`` is not between 0 and ``total_steps``, or ``eta_min``
            is not between 0 and every group's learning rate.
    """

    def __init__(
        self, optimizer: Optimizer, total_steps: int, warmup_steps: int = 0, eta_min: float = 0.0, last_epoch: int = -1
    ) -> None:
        _check_steps(total_steps, warmup_steps)
        factors = []
        for index, group in enumerate(optimizer.param_groups):
            base_lr = float(group.get("initial_lr", group["lr"]))
            _check_eta_min(eta_min, index, base_lr)
            end = eta_min / base_lr if base_lr else 0.0
            factors.append(_CosineFactor(total_steps, warmup_steps, end))
        super().__init__(optimizer, factors, last_epoch)  # type: ignore[arg-type]  # list is invariant: objects, not functions


class LinearWarmupLR(LambdaLR):
    """Linear warm-up to each group's own learning rate, then a straight line down to 0.

    With base learning rate ``lr``, step ``s`` counted from 0, ``w = warmup_steps`` and ``t = total_steps``::

        s < w        lr * (s + 1) / (w + 1)                     (the first step is not zero)
        w <= s < t   lr * (t - s) / (t - w)
        s >= t       0

    Like torch's schedulers, ``load_state_dict`` brings back the saved schedule, ``total_steps`` included. To resume on
    a longer one, build the scheduler with the new ``total_steps`` and ``last_epoch`` instead of loading its state.

    Args:
        optimizer: its groups may have different learning rates.
        total_steps: number of scheduler steps to the end of the decay, warm-up included.
        warmup_steps: steps below the base learning rate; 0 for none, ``total_steps`` for warm-up only.
        last_epoch: index of the last step done, to resume without a state dict; -1 starts afresh.

    Raises:
        ConfigError: ``total_steps`` is below 1, or ``warmup_steps`` is not between 0 and ``total_steps``.
    """

    def __init__(self, optimizer: Optimizer, total_steps: int, warmup_steps: int = 0, last_epoch: int = -1) -> None:
        _check_steps(total_steps, warmup_steps)
        factors = [_LinearFactor(total_steps, warmup_steps) for _ in optimizer.param_groups]
        super().__init__(optimizer, factors, last_epoch)  # type: ignore[arg-type]  # list is invariant: objects, not functions


def _check_steps(total_steps: int, warmup_steps: int) -> None:
    if total_steps < 1:
        raise ConfigError(
            f"total_steps must be at least 1: got total_steps={total_steps}. "
            f"Use the number of optimizer steps of the whole run: num_epochs * len(dataloader)."
        )
    if not 0 <= warmup_steps <= total_steps:
        raise ConfigError(
            f"warmup_steps must be between 0 and total_steps: got warmup_steps={warmup_steps}, "
            f"total_steps={total_steps}. Count both in optimizer steps, not in epochs, and warm up for at most "
            f"{total_steps} of them."
        )


def _check_eta_min(eta_min: float, group_index: int, base_lr: float) -> None:
    if not 0.0 <= eta_min <= base_lr:
        raise ConfigError(
            f"eta_min must be between 0 and the learning rate of every parameter group: got eta_min={eta_min}, "
            f"lr={base_lr} in group {group_index}. Lower eta_min (0.0 always works) or raise that learning rate."
        )
