"""A training loop with hooks, for scripts that do not need their own."""

from hybridpp.trainer import hooks
from hybridpp.trainer.accuracy import Accuracy
from hybridpp.trainer.hook import Hook
from hybridpp.trainer.state import TrainerState
from hybridpp.trainer.trainer import Trainer

__all__ = ["Accuracy", "Hook", "Trainer", "TrainerState", "hooks"]
