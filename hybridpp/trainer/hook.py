"""What happens between the steps of a training loop."""

from collections.abc import Mapping
from typing import Any

from hybridpp.errors import ConfigError
from hybridpp.trainer.state import TrainerState


class Hook:
    """Called by a :class:`~hybridpp.trainer.Trainer` at each moment of the loop, on every rank.

    Override what is needed; each method does nothing by default. A hook may communicate, since every rank calls it at
    the same moment; what it writes to files, it writes on ``trainer.coordinator.is_master()`` only::

        before_fit
            before_epoch
                before_step, after_step          for each batch
                before_evaluation                in epochs with an evaluation
                    before_evaluation_step, after_evaluation_step
                after_evaluation
            after_epoch
        after_fit
        close                                    also after an exception

    Attributes:
        priority: hooks are called in ascending order of it, and in the order of the list where it is equal. Metrics
            have 0, what users write 10, what reports has 20, and what saves 30.
        needs_outputs: whether it reads ``trainer.result["outputs"]`` in evaluations.
        needs_train_outputs: the same in training.
        saves_runs: whether :meth:`on_stop` saves a checkpoint.
    """

    priority = 10
    needs_outputs = False
    needs_train_outputs = False
    saves_runs = False

    def before_fit(self, trainer: TrainerState) -> None:
        """Before the first epoch, after a run was resumed."""

    def after_fit(self, trainer: TrainerState) -> None:
        """After the last epoch; not after an exception."""

    def close(self) -> None:
        """At the end of ``fit``, also after an exception or an interrupt: release what the hook holds.

        It may not communicate: other ranks may not be there.
        """

    def on_stop(self, trainer: TrainerState) -> None:
        """The job was told to stop, and the loop ends: after a step, or in the middle of an evaluation."""

    def before_epoch(self, trainer: TrainerState) -> None:
        """Before the first step of an epoch, or of what is left of it."""

    def after_epoch(self, trainer: TrainerState) -> None:
        """After an epoch and its evaluation."""

    def before_step(self, trainer: TrainerState) -> None:
        """Before a step of training; ``trainer.batch`` is this replica's batch."""

    def after_step(self, trainer: TrainerState) -> None:
        """After ``optimizer.step``; ``trainer.result`` is what ``execute_pipeline`` returned."""

    def before_evaluation(self, trainer: TrainerState) -> None:
        """Before the first batch of an evaluation."""

    def after_evaluation(self, trainer: TrainerState) -> None:
        """After the last one."""

    def before_evaluation_step(self, trainer: TrainerState) -> None:
        """Before a batch of an evaluation."""

    def after_evaluation_step(self, trainer: TrainerState) -> None:
        """After it; ``trainer.result`` is what ``execute_pipeline`` returned."""

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint keeps of this hook: numbers, text, lists, dicts and tensors."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what :meth:`state_dict` returned."""


def check_intervals(**intervals: Any) -> None:
    """Refuse numbers of epochs or steps that are none.

    Raises:
        ConfigError: a number is no integer of at least 1.
    """
    for name, value in intervals.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ConfigError(f"{name} must be an integer of at least 1: got {name}={value!r}.")
