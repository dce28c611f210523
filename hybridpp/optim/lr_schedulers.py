"""Learning-rate schedules that warm up and then decay over a known number of steps."""

from collections.abc import Callable, Sequence
from functools import partial

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from hybridpp.errors import ConfigError
from hybridpp.optim.lr_factors import Cosine, Exponential, FlatCosine, Linear, MultiStep, Polynomial, Warmup


class _WarmupLR(LambdaLR):
    """``torch``'s ``LambdaLR`` with the factors of a schedule.

    Args:
        optimizer: its groups may have different learning rates.
        make: makes a factor, from the final learning rate as a fraction of the base learning rate.
        total_steps, warmup_steps: to check.
        end_lr: name and value of the argument that sets the final learning rate.
        last_epoch: index of the last step done.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        make: Callable[[float], Warmup],
        total_steps: int,
        warmup_steps: int,
        end_lr: tuple[str, float] = ("end_lr", 0.0),
        last_epoch: int = -1,
    ) -> None:
        check_steps(total_steps, warmup_steps)
        name, end = end_lr
        factors = []
        for index, group in enumerate(optimizer.param_groups):
            base_lr = float(group.get("initial_lr", group["lr"]))
            _check_end(name, end, index, base_lr)
            factors.append(make(end / base_lr if base_lr else 0.0))
        super().__init__(optimizer, factors, last_epoch)  # type: ignore[arg-type]  # list is invariant: objects, not functions


class CosineAnnealingWarmupLR(_WarmupLR):
    """Linear warm-up to each group's own learning rate, then half a cosine down to ``eta_min``.

    With base learning rate ``lr``, step ``s`` counted from 0, ``w = warmup_steps`` and ``t = total_steps``::

        s < w        lr * (s + 1) / (w + 1)                     (the first step is not zero)
        w <= s < t   eta_min + (lr - eta_min) * (1 + cos(pi * (s - w) / (t - w))) / 2
        s >= t       eta_min

    Like torch's schedulers, ``load_state_dict`` restores the saved schedule, ``total_steps`` included. To resume on
    a longer one, build the scheduler with the new ``total_steps`` and ``last_epoch`` instead of loading its state.

    Args:
        optimizer: its groups may have different learning rates.
        total_steps: number of scheduler steps to the end of the decay, warm-up included.
        warmup_steps: steps below the base learning rate; 0 for none, ``total_steps`` for warm-up only.
        eta_min: learning rate at the end, absolute, the same for every group.
        last_epoch: index of the last step done, to resume without a state dict; -1 starts at the first step.

    Raises:
        ConfigError: ``total_steps`` is below 1, ``warmup_steps`` is not between 0 and ``total_steps``, or ``eta_min``
            is not between 0 and every group's learning rate.
    """

    def __init__(
        self, optimizer: Optimizer, total_steps: int, warmup_steps: int = 0, eta_min: float = 0.0, last_epoch: int = -1
    ) -> None:
        make = partial(Cosine, total_steps, warmup_steps)
        super().__init__(optimizer, make, total_steps, warmup_steps, ("eta_min", eta_min), last_epoch)


class LinearWarmupLR(_WarmupLR):
    """Linear warm-up to each group's own learning rate, then a straight line down to 0.

    With base learning rate ``lr``, step ``s`` counted from 0, ``w = warmup_steps`` and ``t = total_steps``::

        s < w        lr * (s + 1) / (w + 1)                     (the first step is not zero)
        w <= s < t   lr * (t - s) / (t - w)
        s >= t       0

    Like torch's schedulers, ``load_state_dict`` restores the saved schedule, ``total_steps`` included. To resume on
    a longer one, build the scheduler with the new ``total_steps`` and ``last_epoch`` instead of loading its state.

    Args:
        optimizer: its groups may have different learning rates.
        total_steps: number of scheduler steps to the end of the decay, warm-up included.
        warmup_steps: steps below the base learning rate; 0 for none, ``total_steps`` for warm-up only.
        last_epoch: index of the last step done, to resume without a state dict; -1 starts at the first step.

    Raises:
        ConfigError: ``total_steps`` is below 1, or ``warmup_steps`` is not between 0 and ``total_steps``.
    """

    def __init__(self, optimizer: Optimizer, total_steps: int, warmup_steps: int = 0, last_epoch: int = -1) -> None:
        make = partial(Linear, total_steps, warmup_steps)
        super().__init__(optimizer, make, total_steps, warmup_steps, last_epoch=last_epoch)


class PolynomialWarmupLR(_WarmupLR):
    """Linear warm-up to each group's own learning rate, then down to ``end_lr`` along a power of a straight line.

    With ``s``, ``w`` and ``t`` as in :class:`LinearWarmupLR`, from ``w`` on it is
    ``end_lr + (lr - end_lr) * ((t - s) / (t - w)) ** power``, and ``end_lr`` from ``t`` on.

    Args:
        optimizer: its groups may have different learning rates.
        total_steps: number of scheduler steps to the end of the decay, warm-up included.
        warmup_steps: steps below the base learning rate.
        end_lr: learning rate at the end, absolute, the same for every group.
        power: 1 is a straight line.
        last_epoch: index of the last step done, to resume without a state dict; -1 starts at the first step.

    Raises:
        ConfigError: the steps are impossible, or ``end_lr`` is not between 0 and every group's learning rate.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        total_steps: int,
        warmup_steps: int = 0,
        end_lr: float = 0.0001,
        power: float = 1.0,
        last_epoch: int = -1,
    ) -> None:
        make = partial(Polynomial, total_steps, warmup_steps, power=power)
        super().__init__(optimizer, _ending(make), total_steps, warmup_steps, ("end_lr", end_lr), last_epoch)


class PolynomialLR(PolynomialWarmupLR):
    """:class:`PolynomialWarmupLR` without a warm-up; with ``end_lr=0`` it is torch's ``PolynomialLR``."""

    def __init__(
        self, optimizer: Optimizer, total_steps: int, end_lr: float = 0.0001, power: float = 1.0, last_epoch: int = -1
    ) -> None:
        super().__init__(optimizer, total_steps, 0, end_lr, power, last_epoch)


class FlatAnnealingWarmupLR(_WarmupLR):
    """Linear warm-up to each group's own learning rate, a plateau, then half a cosine down to ``eta_min``.

    Args:
        optimizer: its groups may have different learning rates.
        total_steps: number of scheduler steps to the end of the decay, warm-up included.
        warmup_steps: steps below the base learning rate.
        pct_start: the plateau's fraction of the steps after the warm-up, 0 to 1 (a fraction, despite the name).
        eta_min: learning rate at the end, absolute, the same for every group.
        last_epoch: index of the last step done, to resume without a state dict; -1 starts at the first step.

    Raises:
        ConfigError: the steps are impossible, ``pct_start`` is not between 0 and 1, or ``eta_min`` not between 0 and
            every group's learning rate.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        total_steps: int,
        warmup_steps: int = 0,
        pct_start: float = 0.72,
        eta_min: float = 0.0,
        last_epoch: int = -1,
    ) -> None:
        if not 0.0 <= pct_start <= 1.0:
            raise ConfigError(
                f"pct_start must be a fraction of the steps, from 0 to 1: got pct_start={pct_start}. Use, for example, "
                "0.72."
            )
        num_flat = int((total_steps - warmup_steps) * pct_start)
        make = partial(FlatCosine, total_steps, warmup_steps, num_flat=num_flat)
        super().__init__(optimizer, _ending(make), total_steps, warmup_steps, ("eta_min", eta_min), last_epoch)


class FlatAnnealingLR(FlatAnnealingWarmupLR):
    """:class:`FlatAnnealingWarmupLR` without a warm-up, down to 0."""

    def __init__(self, optimizer: Optimizer, total_steps: int, pct_start: float = 0.72, last_epoch: int = -1) -> None:
        super().__init__(optimizer, total_steps, 0, pct_start, 0.0, last_epoch)


class MultiStepWarmupLR(_WarmupLR):
    """Linear warm-up to each group's own learning rate, which is then multiplied by ``gamma`` at every milestone.

    Args:
        optimizer: its groups may have different learning rates.
        total_steps: number of scheduler steps; only checked against the warm-up.
        warmup_steps: steps below the base learning rate.
        milestones: scheduler steps, counted from the start of the schedule; those in the warm-up take effect after it.
        gamma: factor at each milestone.
        last_epoch: index of the last step done, to resume without a state dict; -1 starts at the first step.

    Raises:
        ConfigError: the steps are impossible.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        total_steps: int,
        warmup_steps: int = 0,
        milestones: Sequence[int] = (),
        gamma: float = 0.1,
        last_epoch: int = -1,
    ) -> None:
        factor = partial(MultiStep, total_steps, warmup_steps, tuple(milestones), gamma)
        super().__init__(optimizer, lambda _: factor(), total_steps, warmup_steps, last_epoch=last_epoch)


class ExponentialWarmupLR(_WarmupLR):
    """Linear warm-up to each group's own learning rate, which is then multiplied by ``gamma`` at every step.

    Args:
        optimizer: its groups may have different learning rates.
        total_steps: number of scheduler steps; only checked against the warm-up.
        warmup_steps: steps below the base learning rate.
        gamma: factor at each step after the warm-up.
        last_epoch: index of the last step done, to resume without a state dict; -1 starts at the first step.

    Raises:
        ConfigError: the steps are impossible.
    """

    def __init__(
        self, optimizer: Optimizer, total_steps: int, warmup_steps: int = 0, gamma: float = 1.0, last_epoch: int = -1
    ) -> None:
        factor = partial(Exponential, total_steps, warmup_steps, gamma)
        super().__init__(optimizer, lambda _: factor(), total_steps, warmup_steps, last_epoch=last_epoch)


class ConstantWarmupLR(_WarmupLR):
    """Linear warm-up to each group's own learning rate, which then stays constant.

    Args:
        optimizer: its groups may have different learning rates.
        total_steps: number of scheduler steps; only checked against the warm-up.
        warmup_steps: steps below the base learning rate; 0: the rate never changes.
        last_epoch: index of the last step done, to resume without a state dict; -1 starts at the first step.

    Raises:
        ConfigError: the steps are impossible.
    """

    def __init__(self, optimizer: Optimizer, total_steps: int, warmup_steps: int = 0, last_epoch: int = -1) -> None:
        factor = partial(Warmup, total_steps, warmup_steps)
        super().__init__(optimizer, lambda _: factor(), total_steps, warmup_steps, last_epoch=last_epoch)


def _ending(make: Callable[..., Warmup]) -> Callable[[float], Warmup]:
    """``make`` as a function of the final factor."""
    return lambda end: make(end=end)


def check_steps(total_steps: int, warmup_steps: int = 0) -> None:
    """Check the numbers of steps of a schedule."""
    if total_steps < 1:
        raise ConfigError(
            f"total_steps must be at least 1: got total_steps={total_steps}. "
            f"Use the number of optimizer steps of the run: num_epochs * len(dataloader)."
        )
    if not 0 <= warmup_steps <= total_steps:
        raise ConfigError(
            f"warmup_steps must be between 0 and total_steps: got warmup_steps={warmup_steps}, "
            f"total_steps={total_steps}. Count both in optimizer steps, not in epochs, and warm up for at most "
            f"{total_steps} of them."
        )


def _check_end(name: str, end: float, group_index: int, base_lr: float) -> None:
    if not 0.0 <= end <= base_lr:
        raise ConfigError(
            f"{name} must be between 0 and the learning rate of every parameter group: got {name}={end}, "
            f"lr={base_lr} in group {group_index}. Lower {name} (0.0 always works) or raise that learning rate."
        )
