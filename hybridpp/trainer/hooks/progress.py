"""A progress bar."""

from typing import Any

from tqdm import tqdm

from hybridpp.trainer.hook import Hook
from hybridpp.trainer.state import TrainerState


class ProgressHook(Hook):
    """A bar of each epoch's steps on rank 0, with the latest loss; ``fit(display_progress=True)`` adds it."""

    priority = 20

    def __init__(self) -> None:
        self._bar: Any = None

    def before_step(self, trainer: TrainerState) -> None:
        if self._bar is not None:
            return
        self._bar = tqdm(
            total=trainer.batches.length,
            initial=trainer.batches.num_taken - 1,
            desc=f"Epoch [{trainer.epoch + 1}/{trainer.num_epochs}]",
            disable=not trainer.coordinator.is_master(),
        )

    def after_step(self, trainer: TrainerState) -> None:
        self._bar.set_postfix(loss=f"{trainer.result['loss'].item():.4g}", refresh=False)
        self._bar.update()

    def before_evaluation(self, trainer: TrainerState) -> None:
        self.close()

    def after_epoch(self, trainer: TrainerState) -> None:
        self.close()

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()
            self._bar = None
