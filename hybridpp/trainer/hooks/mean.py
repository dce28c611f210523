"""A mean over the samples of all replicas, of training and of evaluations."""

from collections.abc import Mapping
from typing import Any

from hybridpp.cluster import current_world, gather_numbers
from hybridpp.trainer.hook import Hook
from hybridpp.trainer.state import TrainerState


class MeanHook(Hook):
    """Sums a number and its weight over steps, and writes the mean over all replicas to ``trainer.metrics``.

    Subclasses call :meth:`add` in ``after_step`` or ``after_evaluation_step``.

    Args:
        name: of the metric: ``"loss"`` gives ``"train/loss"`` and ``"test/loss"``.
    """

    priority = 0

    def __init__(self, name: str):
        self.name = name
        self._trainer: TrainerState | None = None
        self._is_resumed = False
        self._train: list[tuple[Any, Any]] = []
        self._test: list[tuple[Any, Any]] = []

    def add(self, total: Any, weight: Any, *, training: bool) -> None:
        """Add numbers, or tensors of one element, whose values are read at the end or at the next call but one.

        Args:
            total: of the batch.
            weight: the number that the mean divides by.
            training: whether it is a step of training.
        """
        parts = self._train if training else self._test
        parts.append((total, weight))
        if len(parts) > 2:  # the last two may not be known yet
            parts[:2] = [_sum(parts[:2])]

    def before_fit(self, trainer: TrainerState) -> None:
        self._trainer = trainer
        if not self._is_resumed:
            return
        self._is_resumed = False
        # What a checkpoint has are sums over the replicas: one of the ranks that are counted goes on from them.
        rows = gather_numbers(
            current_world().control(), "in a metric of Trainer", [trainer.booster.plugin.holds_results]
        )
        if trainer.coordinator.rank != [bool(row[0]) for row in rows].index(True):
            self._train.clear()

    def before_evaluation(self, trainer: TrainerState) -> None:
        self._test.clear()

    def after_evaluation(self, trainer: TrainerState) -> None:
        self._write(trainer, "test", self._test)

    def after_epoch(self, trainer: TrainerState) -> None:
        self._write(trainer, "train", self._train)
        self._train.clear()

    def state_dict(self) -> dict[str, Any]:
        """The sums over all replicas. Collective: every rank of the world."""
        own = _sum(self._train)
        return {"train": own if self._trainer is None else self._trainer.sum_over_replicas(*own)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._is_resumed = True
        total, weight = state.get("train", (0.0, 0.0))
        self._train = [(total, weight)] if weight else []

    def _write(self, trainer: TrainerState, phase: str, parts: list[tuple[Any, Any]]) -> None:
        total, weight = trainer.sum_over_replicas(*_sum(parts))
        if weight:
            trainer.metrics[f"{phase}/{self.name}"] = total / weight


def _sum(parts: list[tuple[Any, Any]]) -> tuple[float, float]:
    return sum(float(total) for total, _ in parts), sum(float(weight) for _, weight in parts)
