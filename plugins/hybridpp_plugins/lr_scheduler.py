"""A learning-rate schedule that does not advance at skipped optimizer steps."""

from typing import Any

from torch.optim.lr_scheduler import LRScheduler

from hybridpp_plugins.optimizer import HybridOptimizer

_SINCE = "hybridpp_since_last_step"


class SkipAwareScheduler(LRScheduler):
    """The user's scheduler; ``step`` does nothing if every optimizer step since the last one was skipped."""

    def __init__(self, scheduler: LRScheduler, optimizer: HybridOptimizer):
        # No call to the base class: everything but `step` is the wrapped scheduler's.
        self._scheduler = scheduler
        self._hybrid_optimizer = optimizer
        self._counted = optimizer.counts
        self._resumed_at = optimizer.resumed_at
        # Steps between the last call of `step` and the state that was loaded.
        self._before = (0, 0)

    def step(self, *args: Any, **kwargs: Any) -> None:
        """Advance the schedule, unless overflows skipped every optimizer step since the last call."""
        applied, skipped = self._since()
        self._count()
        if applied or not skipped:
            self._scheduler.step(*args, **kwargs)

    def _since(self) -> tuple[int, int]:
        """How many steps were applied and skipped since the last call."""
        resumed, now = self._hybrid_optimizer.resumed_at, self._hybrid_optimizer.counts
        if resumed is not self._resumed_at and resumed is not None:  # a state was loaded
            self._counted, self._resumed_at = resumed, resumed
        applied, skipped = self._before
        return now.applied - self._counted.applied + applied, now.skipped - self._counted.skipped + skipped

    def _count(self, before: tuple[int, int] = (0, 0)) -> None:
        self._counted, self._resumed_at = self._hybrid_optimizer.counts, self._hybrid_optimizer.resumed_at
        self._before = before

    def get_lr(self) -> Any:
        """What the wrapped scheduler computes."""
        return self._scheduler.get_lr()

    def get_last_lr(self) -> list[Any]:
        """The learning rates in use, by parameter group."""
        return list(self._scheduler.get_last_lr())

    def state_dict(self) -> dict[str, Any]:
        """The wrapped scheduler's state, and the optimizer's steps since the last call of :meth:`step`."""
        return {**self._scheduler.state_dict(), _SINCE: list(self._since())}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Set the wrapped scheduler's state, also from the wrapped scheduler's own ``state_dict``.

        It may be called before or after the optimizer's ``load_state_dict``.
        """
        state = dict(state_dict)
        applied, skipped = state.pop(_SINCE, (0, 0))
        self._scheduler.load_state_dict(state)
        self._count((applied, skipped))

    def unwrap(self) -> LRScheduler:
        """The scheduler that was given to ``boost``."""
        return self._scheduler

    def __getattr__(self, name: str) -> Any:
        if name == "_scheduler":  # not set yet: being copied or unpickled
            raise AttributeError(name)
        return getattr(self._scheduler, name)
