"""The exceptions of hybridpp: a message states the rule, the values that break it and what to do.

Also how a message quotes another error, and a value that is long.
"""

from collections.abc import Collection
from typing import Any

_MOST_NAMES, _MOST_CHARACTERS = 8, 200


class HybridppError(Exception):
    """Base class of every error that hybridpp raises on purpose."""


class ConfigError(HybridppError, ValueError):
    """A setting, or a combination of settings, that cannot work."""


class LaunchError(HybridppError, RuntimeError):
    """The processes of the job could not connect to each other."""


class ScheduleError(HybridppError, ValueError):
    """A schedule that is incomplete, out of order or would deadlock."""


class PartitionError(HybridppError, RuntimeError):
    """A model that cannot be cut into the requested stages."""


class DataError(HybridppError, ValueError):
    """A batch that cannot be used, or ranks that hold different batches."""


class PeerError(HybridppError, RuntimeError):
    """Another rank failed; the message on that rank says why."""


class RefusedByPeerError(PeerError):
    """Another rank refused or left a step, or failed in a save or load, that is over: it can still answer."""


class PeerTimeoutError(PeerError):
    """Another rank did not answer in time."""


class UnlikeCallsError(HybridppError, RuntimeError):
    """Ranks made different calls where all must make the same."""


class ClosedError(HybridppError, RuntimeError):
    """A plugin was used after ``close()``."""


class ResourceError(HybridppError, RuntimeError):
    """The host is out of a resource: shared memory, file descriptors."""


class NonFiniteLossError(HybridppError, RuntimeError):
    """The criterion returned NaN or infinity."""


class NonFiniteGradientError(HybridppError, RuntimeError):
    """A gradient is NaN or infinite; no weight was changed."""


class UnequalRanksError(HybridppError, RuntimeError):
    """Ranks that must compute the same result got different ones."""


class UnequalWeightsError(HybridppError, RuntimeError):
    """Copies of a weight on several ranks no longer have the same bits."""


class DeadlockError(HybridppError, RuntimeError):
    """Every rank waits for another rank."""


class CheckpointError(HybridppError, RuntimeError):
    """A folder of weights that cannot be written or does not fit the model."""


def text_of(error: BaseException) -> str:
    """What an error says, inside a sentence: without the full stop at its end."""
    return str(error).rstrip(".")


def named(error: BaseException) -> str:
    """The class of an error and what it says, inside a sentence."""
    return f"{type(error).__name__}: {text_of(error)}"


def shown(value: Any) -> str:
    """The ``repr`` of a value that somebody gave, cut where it is long."""
    try:
        text = repr(value)
    except ValueError:  # of an int with more than 4300 digits
        return f"<{type(value).__name__}, too long to be shown>"
    return text if len(text) <= _MOST_CHARACTERS else f"{text[:_MOST_CHARACTERS]}… ({len(text):,} characters)"


def some_of(values: Collection[Any]) -> str:
    """A list of values, as Python writes it; of many the first ones, and how many there are."""
    first = ", ".join(shown(value) for value, _ in zip(values, range(_MOST_NAMES), strict=False))
    more = len(values) - _MOST_NAMES
    return f"[{first}]" + (f" and {more:,} more" if more > 0 else "")
