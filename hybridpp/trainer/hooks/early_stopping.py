"""The end of a run that no longer improves."""

from collections.abc import Mapping
from typing import Any, Literal

from hybridpp.errors import ConfigError
from hybridpp.trainer.hook import Hook, check_intervals
from hybridpp.trainer.state import TrainerState


class EarlyStoppingHook(Hook):
    """Ends the run when a metric has not improved for some evaluations in a row.

    Args:
        metric: its name in ``trainer.metrics``.
        patience: number of evaluations without improvement after which the run ends.
        mode: whether it improves by getting smaller or larger.
        min_delta: by how much at least.

    Attributes:
        best: its best value so far.
    """

    priority = 20

    def __init__(
        self,
        metric: str = "test/loss",
        patience: int = 3,
        mode: Literal["min", "max"] = "min",
        min_delta: float = 0.0,
    ):
        if mode not in ("min", "max"):
            raise ConfigError(f"mode is one of min, max: got {mode!r}.")
        check_intervals(patience=patience)
        self.best: float | None = None
        self._metric, self._patience, self._sign, self._min_delta = (
            metric,
            patience,
            1 if mode == "min" else -1,
            min_delta,
        )
        self._num_bad = 0
        self._is_evaluated = False

    def after_evaluation(self, trainer: TrainerState) -> None:
        self._is_evaluated = True

    def after_epoch(self, trainer: TrainerState) -> None:
        # Of what no evaluation changes, every epoch counts.
        if self._metric.startswith("test/") and not self._is_evaluated:
            return
        self._is_evaluated = False
        value = trainer.metric(self._metric)
        if self.best is None or self._sign * (self.best - value) > self._min_delta:
            self.best, self._num_bad = value, 0
            return
        self._num_bad += 1
        trainer.should_stop = trainer.should_stop or self._num_bad >= self._patience

    def state_dict(self) -> dict[str, Any]:
        return {"best": self.best, "num_bad": self._num_bad}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.best, self._num_bad = state.get("best"), state.get("num_bad", 0)
