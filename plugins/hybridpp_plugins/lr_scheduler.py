"""A learning-rate schedule that does not run ahead of the weights."""

from typing import Any

from torch.optim.lr_scheduler import LRScheduler

from hybridpp_plugins.optimizer import HybridOptimizer


class SkipAwareScheduler(LRScheduler):
    """The user's scheduler; ``step`` does nothing after an optimizer step that was skipped for an overflow."""

    def __init__(self, scheduler: LRScheduler, optimizer: HybridOptimizer):
        # No call to the base class: everything but `step` is the wrapped scheduler's.
        self._scheduler = scheduler
        self._hybrid_optimizer = optimizer

    def step(self, *args: Any, **kwargs: Any) -> None:
        """Advance the schedule, unless the last optimizer step was skipped."""
        if not self._hybrid_optimizer.last_step_skipped:
            self._scheduler.step(*args, **kwargs)

    def get_last_lr(self) -> list[Any]:
        """The learning rates in use, by parameter group."""
        return list(self._scheduler.get_last_lr())

    def state_dict(self) -> dict[str, Any]:
        """The wrapped scheduler's state."""
        return dict(self._scheduler.state_dict())

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Set the wrapped scheduler's state."""
        self._scheduler.load_state_dict(state_dict)

    def __getattr__(self, name: str) -> Any:
        if name == "_scheduler":  # not set yet: being copied or unpickled
            raise AttributeError(name)
        return getattr(self._scheduler, name)
