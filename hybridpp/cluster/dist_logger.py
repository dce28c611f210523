"""Logging that says which rank speaks, and lets only some of them."""

import logging
from collections.abc import Iterable, MutableMapping
from typing import Any

from hybridpp.cluster.current import current_world


class DistLogger(logging.LoggerAdapter[logging.Logger]):
    """A standard logger whose methods also take ``ranks=[0]``: the ranks that speak; all of them by default."""

    def process(self, msg: Any, kwargs: MutableMapping[str, Any]) -> tuple[Any, MutableMapping[str, Any]]:
        return f"[rank {current_world().rank}] {msg}", kwargs

    def log(  # type: ignore[override]  # `ranks` comes on top
        self, level: int, msg: object, *args: object, ranks: Iterable[int] | None = None, **kwargs: Any
    ) -> None:
        """Log on the given ranks (all, if None)."""
        if ranks is None or current_world().rank in ranks:
            # One level more: the record names the caller's line, not this one.
            super().log(level, msg, *args, **{**kwargs, "stacklevel": kwargs.get("stacklevel", 1) + 1})


def get_dist_logger(name: str = "hybridpp") -> DistLogger:
    """The logger called ``name``; it shows messages once the script configures ``logging`` (``basicConfig``)."""
    return DistLogger(logging.getLogger(name))


def disable_existing_loggers(include: list[str] | None = None, exclude: list[str] | None = None) -> None:
    """Raise other loggers' level to WARNING, so that a log holds what the script and hybridpp say.

    Args:
        include: the loggers to quiet; None means every one that exists.
        exclude: loggers, with those below them, to leave alone; None means hybridpp's own.
    """
    spared = ["hybridpp"] if exclude is None else exclude
    for name in list(logging.root.manager.loggerDict) if include is None else include:
        if not any(name == other or name.startswith(f"{other}.") for other in spared):
            logging.getLogger(name).setLevel(logging.WARNING)
