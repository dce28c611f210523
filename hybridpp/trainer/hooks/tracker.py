"""Metrics in an experiment tracker."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from hybridpp.cluster import current_world
from hybridpp.errors import ConfigError
from hybridpp.trainer.hook import Hook, check_intervals
from hybridpp.trainer.state import TrainerState


class TrackerHook(Hook):
    """Writes losses, learning rates and metrics to a tracker of ``accelerate.tracking``, on rank 0.

    Args:
        tracker: ``"tensorboard"``, ``"wandb"`` or another name of accelerate's; or an object of a subclass of
            ``accelerate.tracking.GeneralTracker``.
        run_name: of the run or project.
        logging_dir: folder of trackers that write files.
        interval: steps between two values of the loss and the learning rate.
        config: settings of the run that the tracker keeps.
        options: further arguments of the tracker's class.

    Raises:
        ConfigError: the tracker is unknown, or its package is not installed.
    """

    priority = 20

    def __init__(
        self,
        tracker: Any = "tensorboard",
        run_name: str = "run",
        logging_dir: str | Path = "runs",
        *,
        interval: int = 1,
        config: Mapping[str, Any] | None = None,
        **options: Any,
    ):
        check_intervals(interval=interval)
        if not isinstance(tracker, str) and not callable(getattr(tracker, "log", None)):
            raise ConfigError(
                f"tracker is a name or an object of a subclass of accelerate.tracking.GeneralTracker: got {tracker!r}."
            )
        self._run_name, self._logging_dir, self._interval = run_name, logging_dir, interval
        self._config, self._options = config, options
        self._class = _tracker_class(tracker) if isinstance(tracker, str) else None
        self._given = None if isinstance(tracker, str) else tracker
        self._tracker: Any = None

    def before_fit(self, trainer: TrainerState) -> None:
        if not trainer.coordinator.is_master():
            return
        if self._class is None:
            self._tracker = self._given
        else:
            folder = {"logging_dir": str(self._logging_dir)} if self._class.requires_logging_directory else {}
            self._tracker = self._class(self._run_name, **folder, **self._options)
        self._tracker.main_process_only = False  # only this rank calls it
        _let_accelerate_log()
        self._tracker.start()
        if self._config is not None:
            self._tracker.store_init_configuration(dict(self._config))

    def after_step(self, trainer: TrainerState) -> None:
        if self._tracker is not None and trainer.step % self._interval == 0:
            self._tracker.log({f"step/{name}": value for name, value in trainer.step_values().items()}, trainer.step)

    def after_epoch(self, trainer: TrainerState) -> None:
        if self._tracker is not None:
            self._tracker.log({**trainer.metrics, "epoch": trainer.epoch + 1}, trainer.step)

    def close(self) -> None:
        if self._tracker is not None:
            self._tracker.finish()
            self._tracker = None


def _let_accelerate_log() -> None:
    """Its logger refuses to work before it has looked at the job, for which it communicates nothing."""
    from accelerate import PartialState  # noqa: PLC0415  # of use to runs with a tracker only

    num_threads = torch.get_num_threads()
    PartialState(cpu=current_world().device.type == "cpu")
    torch.set_num_threads(num_threads)


def _tracker_class(name: str) -> Any:
    from accelerate.tracking import (  # noqa: PLC0415  # of use to runs with a tracker only
        LOGGER_TYPE_TO_CLASS,
        get_available_trackers,
    )

    if name not in LOGGER_TYPE_TO_CLASS:
        raise ConfigError(f"tracker is one of {', '.join(sorted(map(str, LOGGER_TYPE_TO_CLASS)))}: got {name!r}.")
    if name not in map(str, get_available_trackers()):
        package = {"tensorboard": "tensorboardX"}.get(name, name)
        raise ConfigError(f"tracker {name!r} needs a package that is not installed. Run: pip install {package}.")
    return LOGGER_TYPE_TO_CLASS[name]
