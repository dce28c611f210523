"""The mean loss of an epoch and of an evaluation."""

from hybridpp.trainer.hooks.mean import MeanHook
from hybridpp.trainer.state import TrainerState


class LossHook(MeanHook):
    """``train/loss`` and ``test/loss``: the mean over samples, each counted once.

    Batches count by what the criterion's mean is over: by ``criterion.num_items(batch)`` if it has that method.
    A criterion that adds up (``reduction = "sum"``) is divided by the number of samples. A :class:`Trainer` adds this
    hook if there is a criterion.
    """

    def __init__(self) -> None:
        super().__init__("loss")

    def after_step(self, trainer: TrainerState) -> None:
        self._add(trainer, training=True)

    def after_evaluation_step(self, trainer: TrainerState) -> None:
        if trainer.criterion is not None:
            self._add(trainer, training=False)

    def _add(self, trainer: TrainerState, *, training: bool) -> None:
        if not trainer.batches.num_samples:
            return
        num_items = getattr(trainer.criterion, "num_items", None)
        weight = float(num_items(trainer.batches.batch)) if num_items else float(trainer.batches.num_samples)
        is_sum = getattr(trainer.criterion, "reduction", None) == "sum"
        loss = trainer.result["loss"]
        if weight:
            self.add(loss if is_sum else loss * weight, weight, training=training)
