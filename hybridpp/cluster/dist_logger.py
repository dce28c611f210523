"""Logging with the rank in each message, optionally on some ranks only."""

import logging
import sys
from collections.abc import Iterable, MutableMapping
from contextlib import nullcontext
from typing import Any

from hybridpp.cluster.current import current_world


class _StandardError(logging.Handler):
    """Writes to the current standard error."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            # A progress bar of this process is cleared before a line, and drawn again after it.
            tqdm = sys.modules.get("tqdm")
            with tqdm.tqdm.external_write_mode(file=sys.stderr) if tqdm else nullcontext():
                sys.stderr.write(f"{self.format(record)}\n")
        except Exception:
            self.handleError(record)


_HANDLER = _StandardError()
_HANDLER.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s", "%H:%M:%S"))


class DistLogger(logging.LoggerAdapter[logging.Logger]):
    """A standard logger whose methods also take ``ranks=[0]``, the ranks that log; all by default.

    Until ``logging`` is configured, messages from INFO on go to standard error; afterwards the configuration decides
    which messages are written, and where.
    """

    def process(self, msg: Any, kwargs: MutableMapping[str, Any]) -> tuple[Any, MutableMapping[str, Any]]:
        return f"[rank {current_world().rank}] {msg}", kwargs

    def isEnabledFor(self, level: int) -> bool:
        """Whether a message of this level is shown."""
        return self._speaker().isEnabledFor(level)

    def log(  # type: ignore[override]  # `ranks` comes on top
        self, level: int, msg: object, *args: object, ranks: Iterable[int] | None = None, **kwargs: Any
    ) -> None:
        """Log on the given ranks (None: all)."""
        speaker = self._speaker()
        if speaker.isEnabledFor(level) and (ranks is None or current_world().rank in ranks):
            text, kwargs = self.process(msg, kwargs)  # type: ignore[assignment]  # a dict it is
            # One level more, so that the record names the caller's line.
            speaker.log(level, text, *args, **{**kwargs, "stacklevel": kwargs.get("stacklevel", 1) + 1})

    def _speaker(self) -> logging.Logger:
        """The logger itself; or, where it would tell nobody, one of its name that no configuration knows."""
        if self.logger.hasHandlers():
            return self.logger
        speaker = logging.Logger(self.logger.name, _own_level(self.logger))
        speaker.addHandler(_HANDLER)
        return speaker


def _own_level(logger: logging.Logger) -> int:
    """The level that is set on a logger or its parents; INFO if there is none."""
    above: logging.Logger | None = logger
    while above is not None and above is not logging.root:
        if above.level:
            return above.level
        above = above.parent
    return logging.INFO if logging.root.level == logging.WARNING else logging.root.level


def get_dist_logger(name: str = "hybridpp") -> DistLogger:
    """The logger called ``name``; it shows messages from INFO on, unless the script has configured ``logging``."""
    return DistLogger(logging.getLogger(name))


def disable_existing_loggers(include: list[str] | None = None, exclude: list[str] | None = None) -> None:
    """Raise other loggers' level to WARNING, so that a log holds the messages of the script and of hybridpp.

    Loggers whose effective level is WARNING or higher already do not change.

    Args:
        include: the loggers to quiet; None means every one that exists.
        exclude: loggers that do not change, with those below them; None means hybridpp's own.
    """
    spared = ["hybridpp"] if exclude is None else exclude
    # From the top down. A level that a logger has anyway is not written to it: transformers compares what is written
    # (`logger.level`), and logs its own tensor parallelism at every load if that is WARNING.
    for name in sorted(logging.root.manager.loggerDict if include is None else include):
        logger = logging.getLogger(name)
        is_spared = any(name == other or name.startswith(f"{other}.") for other in spared)
        if not is_spared and logger.getEffectiveLevel() < logging.WARNING:
            logger.setLevel(logging.WARNING)
