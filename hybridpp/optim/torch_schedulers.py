"""torch's learning-rate schedules with Colossal-AI's signatures: ``total_steps`` is the second argument.

The classes derive from torch's, which compute, save and load.
"""

from collections.abc import Callable, Sequence
from typing import Literal, TypedDict, Unpack

from torch.optim import Optimizer, lr_scheduler

from hybridpp.optim.lr_schedulers import check_steps

Factor = Callable[[int], float]


class CosineAnnealingLR(lr_scheduler.CosineAnnealingLR):
    """Half a cosine from each group's learning rate down to ``eta_min`` in ``total_steps`` steps, then up again.

    Raises:
        ConfigError: ``total_steps`` is below 1.
    """

    def __init__(self, optimizer: Optimizer, total_steps: int, eta_min: float = 0.0, last_epoch: int = -1) -> None:
        check_steps(total_steps)
        super().__init__(optimizer, total_steps, eta_min, last_epoch)


class StepLR(lr_scheduler.StepLR):
    """Multiplies the learning rate by ``gamma`` every ``step_size`` steps; ``total_steps`` is only checked.

    Raises:
        ConfigError: ``total_steps`` is below 1.
    """

    def __init__(
        self, optimizer: Optimizer, total_steps: int, step_size: int = 1, gamma: float = 0.1, last_epoch: int = -1
    ) -> None:
        check_steps(total_steps)
        super().__init__(optimizer, step_size, gamma, last_epoch)


class MultiStepLR(lr_scheduler.MultiStepLR):
    """Multiplies the learning rate by ``gamma`` at each of the ``milestones``; ``total_steps`` is only checked.

    Raises:
        ConfigError: ``total_steps`` is below 1.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        total_steps: int,
        milestones: Sequence[int] = (),
        gamma: float = 0.1,
        last_epoch: int = -1,
    ) -> None:
        check_steps(total_steps)
        super().__init__(optimizer, milestones, gamma, last_epoch)


class ExponentialLR(lr_scheduler.ExponentialLR):
    """Multiplies the learning rate by ``gamma`` at every step; ``total_steps`` is only checked.

    Raises:
        ConfigError: ``total_steps`` is below 1.
    """

    def __init__(self, optimizer: Optimizer, total_steps: int, gamma: float = 1.0, last_epoch: int = -1) -> None:
        check_steps(total_steps)
        super().__init__(optimizer, gamma, last_epoch)


class LambdaLR(lr_scheduler.LambdaLR):
    """Each group's learning rate times ``lr_lambda(step)``; ``total_steps`` is only checked.

    Raises:
        ConfigError: ``total_steps`` is below 1.
    """

    def __init__(
        self, optimizer: Optimizer, total_steps: int, lr_lambda: Factor | list[Factor], last_epoch: int = -1
    ) -> None:
        check_steps(total_steps)
        super().__init__(optimizer, lr_lambda, last_epoch)


class MultiplicativeLR(lr_scheduler.MultiplicativeLR):
    """Multiplies the learning rate by ``lr_lambda(step)`` at every step; ``total_steps`` is only checked.

    Raises:
        ConfigError: ``total_steps`` is below 1.
    """

    def __init__(
        self, optimizer: Optimizer, total_steps: int, lr_lambda: Factor | list[Factor], last_epoch: int = -1
    ) -> None:
        check_steps(total_steps)
        super().__init__(optimizer, lr_lambda, last_epoch)


class OneCycleOptions(TypedDict, total=False):
    """Options that :class:`OneCycleLR` passes on to torch's."""

    anneal_strategy: Literal["cos", "linear"]
    cycle_momentum: bool
    base_momentum: float
    max_momentum: float
    div_factor: float
    final_div_factor: float
    three_phase: bool
    last_epoch: int


class OneCycleLR(lr_scheduler.OneCycleLR):
    """Up to each group's learning rate, then down to almost 0, with the momentum inverted (arXiv:1708.07120).

    Args:
        optimizer: its groups' learning rates are the maxima.
        total_steps: length of the cycle; torch raises at later steps.
        pct_start: the fraction of the steps in which the rate rises.
        **options: torch's ``anneal_strategy``, ``cycle_momentum``, ``base_momentum``, ``max_momentum``,
            ``div_factor``, ``final_div_factor``, ``three_phase`` and ``last_epoch``.

    Raises:
        ConfigError: ``total_steps`` is below 1.
    """

    def __init__(
        self, optimizer: Optimizer, total_steps: int, pct_start: float = 0.3, **options: Unpack[OneCycleOptions]
    ) -> None:
        check_steps(total_steps)
        max_lrs = [float(group.get("max_lr", group["lr"])) for group in optimizer.param_groups]
        super().__init__(optimizer, max_lrs, total_steps, pct_start=pct_start, **options)
