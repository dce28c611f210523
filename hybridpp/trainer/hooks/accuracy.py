"""The accuracy of evaluations, and other ratios of counts."""

from collections.abc import Callable
from typing import Any

from hybridpp.errors import DataError
from hybridpp.trainer.accuracy import Accuracy
from hybridpp.trainer.hooks.mean import MeanHook
from hybridpp.trainer.state import TrainerState


class AccuracyHook(MeanHook):
    """``test/accuracy`` over all replicas, each sample counted once.

    Args:
        accuracy: ``accuracy(outputs, batch)`` is the number of right predictions of a batch and that of all of them;
            None: :class:`~hybridpp.trainer.Accuracy`. Any ratio of two sums can be computed this way.
        name: of the metric.
        training: whether to compute ``train/accuracy``, too; steps of training then keep the model's outputs.
    """

    needs_outputs = True

    def __init__(
        self,
        accuracy: Callable[[Any, Any], tuple[Any, Any]] | None = None,
        name: str = "accuracy",
        *,
        training: bool = False,
    ):
        super().__init__(name)
        self._accuracy = accuracy or Accuracy()
        self.needs_train_outputs = training

    def after_step(self, trainer: TrainerState) -> None:
        if self.needs_train_outputs:
            self._add(trainer, training=True)

    def after_evaluation_step(self, trainer: TrainerState) -> None:
        self._add(trainer, training=False)

    def _add(self, trainer: TrainerState, *, training: bool) -> None:
        outputs = trainer.result["outputs"]
        if outputs is not None and trainer.batches.num_samples:
            found = self._accuracy(outputs, trainer.batches.batch)
            if not isinstance(found, tuple | list) or len(found) != 2:
                raise DataError(
                    f"the function of AccuracyHook returns two numbers, (right, all): got {type(found).__name__}."
                )
            self.add(*found, training=training)
