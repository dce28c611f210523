"""A learning-rate schedule that does not run ahead of the weights."""

from typing import Any

from torch.optim.lr_scheduler import LRScheduler

from hybridpp_plugins.optimizer import HybridOptimizer


class SkipAwareScheduler(LRScheduler):
    """The user's scheduler; ``step`` does nothing if every optimizer step since the last one was skipped."""

    def __init__(self, scheduler: LRScheduler, optimizer: HybridOptimizer):
        # No call to the base class: everything but `step` is the wrapped scheduler's.
        self._scheduler = scheduler
        self._hybrid_optimizer = optimizer
        self._counted = (optimizer.applied_steps, optimizer.skipped_steps)

    def step(self, *args: Any, **kwargs: Any) -> None:
        """Advance the schedule, unless overflows skipped every optimizer step since the last call."""
        applied, skipped = self._counted
        now = self._counted = (self._hybrid_optimizer.applied_steps, self._hybrid_optimizer.skipped_steps)
        if now[0] > applied or now[1] == skipped:
            self._scheduler.step(*args, **kwargs)

    def get_lr(self) -> Any:
        """What the wrapped scheduler computes."""
        return self._scheduler.get_lr()

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
