"""The mean loss of an epoch and of an evaluation."""

from typing import Any, NamedTuple

from hybridpp.trainer.hooks.mean import MeanHook
from hybridpp.trainer.state import TrainerState


class LossHook(MeanHook):
    """``train/loss`` and ``test/loss``: the mean over items, each counted once.

    Batches count by what the criterion's mean is over (docs/losses.md), so that the loss does not depend on how samples
    are batched. A criterion that adds up (``reduction = "sum"``) is divided by the number of samples. Of
    batches with ``num_items_in_batch`` and several replicas it is one replica's share, on average: leave that entry
    out. A :class:`Trainer` adds this hook if there is a criterion.
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
        is_sum = getattr(trainer.criterion, "reduction", None) == "sum"
        loss, num_samples = trainer.result["loss"], float(trainer.batches.num_samples)
        if is_sum:
            self.add(loss, num_samples, training=training)
            return
        num_items = trainer.result.get("num_items")
        weight = num_samples if num_items is None else num_items
        self.add(_Total(loss, weight), weight, training=training)


class _Total(NamedTuple):
    """A loss times its number of items, read when it is needed."""

    loss: Any
    weight: Any

    def __float__(self) -> float:
        weight = float(self.weight)
        return weight * float(self.loss) if weight else 0.0
