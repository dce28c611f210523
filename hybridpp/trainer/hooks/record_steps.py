"""A recording of some steps, for ``hybridpp report``."""

from contextlib import ExitStack
from pathlib import Path
from typing import Any

from hybridpp.cluster import get_dist_logger
from hybridpp.trainer.hook import Hook, check_intervals
from hybridpp.trainer.state import TrainerState


class RecordStepsHook(Hook):
    """Records steps with ``booster.record_timeline``, and saves them for ``hybridpp report``, once in a run.

    Args:
        path: the folder, or .json file, of the recording; replaced if it is there.
        num_steps: how many; fewer, if the epoch ends before.
        first_step: the first of them, from 1, counted from where this process began; its first steps take longer than
            others. A fit that ends before records nothing, and rank 0 warns of it.

    Raises:
        ConfigError: a number is no integer of at least 1.
    """

    def __init__(self, path: str | Path, num_steps: int = 10, *, first_step: int = 11):
        check_intervals(num_steps=num_steps, first_step=first_step)
        self._path, self._num_steps, self._first_step = path, num_steps, first_step
        self._stack = ExitStack()
        self._recording: Any = None
        self._num_recorded = self._num_steps_run = 0

    def before_step(self, trainer: TrainerState) -> None:
        self._num_steps_run += 1
        if self._recording is None and not self._num_recorded and self._num_steps_run >= self._first_step:
            self._recording = self._stack.enter_context(trainer.booster.record_timeline(trainer.model))

    def after_step(self, trainer: TrainerState) -> None:
        self._num_recorded += self._recording is not None
        if self._num_recorded == self._num_steps:
            self._finish()

    def before_evaluation(self, trainer: TrainerState) -> None:
        self._finish()

    def after_epoch(self, trainer: TrainerState) -> None:
        self._finish()

    def on_stop(self, trainer: TrainerState) -> None:
        self._finish()

    def after_fit(self, trainer: TrainerState) -> None:
        if not self._num_recorded:
            get_dist_logger().warning(
                f"no step was recorded in {self._path}: the fit had {self._num_steps_run} steps, and "
                f"first_step={self._first_step}. Use a smaller first_step.",
                ranks=[0],
            )

    def close(self) -> None:
        if self._recording is not None:
            # After an error: nothing is gathered, because other ranks may not be there.
            error = RuntimeError("the run has ended")
            self._stack.__exit__(type(error), error, None)
            self._recording = None

    def _finish(self) -> None:
        """Gather what the ranks recorded, and save it. Collective: all ranks of the world."""
        if self._recording is not None:
            recording, self._recording = self._recording, None
            self._stack.close()
            recording.save(self._path)
