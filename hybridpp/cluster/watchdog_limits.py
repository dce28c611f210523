"""Time limits of a watchdog, by section of a rank's code."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import get_args

from hybridpp.cluster.progress import Section
from hybridpp.errors import ConfigError, shown

# Tracing and compiling a large model, and writing a large checkpoint, may take so long.
_LONG_S = 1800.0
# Part of the job's time limit after which a wait is reported in any case, before it ends by an error.
_OF_TIMEOUT = 0.9


@dataclass(frozen=True, kw_only=True)
class WatchdogLimits:
    """Seconds without progress after which a section is reported.

    Attributes:
        step: in a step, also of a rank that waits for others.
        data: while a batch is read.
        setup: while plugins, models and plans are made, and blocks are compiled; the first step of its kind counts so.
        save: while a checkpoint is written or read.
        script: in the user's code between calls, if another rank waits for it; that it does is told after ``step``.
        timeout_s: of the job's communications.
    """

    step: float
    data: float
    setup: float
    save: float
    script: float
    timeout_s: float

    @classmethod
    def of(cls, given: float | Mapping[str, float], timeout_s: float) -> "WatchdogLimits":
        """The limits of ``launch_from_torch(watchdog_s=given)``.

        Raises:
            ConfigError: a limit is no positive number of seconds, a section is unknown, or waits would end by
                ``timeout_s`` before they were reported.
        """
        names = get_args(Section)
        limits = dict(given) if isinstance(given, Mapping) else {"step": given}
        for name, value in limits.items():
            if name not in names:
                raise ConfigError(f"watchdog_s has limits of {', '.join(names)}: got one of {shown(name)}.")
            if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
                raise ConfigError(f"watchdog_s is a number of seconds above 0: got {shown(value)} for {name}. Use 60.")
        if "step" not in limits:
            raise ConfigError(f'watchdog_s needs a limit of a step: got {dict(limits)}. Add "step": 60.')
        step = limits["step"]
        if step > _OF_TIMEOUT * timeout_s:
            raise ConfigError(
                f"a rank that waits gives up after timeout_s, before the watchdog would report: got {step:g} s for a "
                f"step and timeout_s={timeout_s:g}. Use at most {_OF_TIMEOUT * timeout_s:g} s, or raise timeout_s."
            )
        defaults = {"data": step, "setup": max(step, _LONG_S), "save": max(step, _LONG_S), "script": math.inf}
        return cls(**{**defaults, **limits}, timeout_s=timeout_s)

    def as_text(self) -> str:
        """The limits in seconds, by section."""
        return ", ".join(f"{name} {getattr(self, name):g}" for name in get_args(Section))

    def of_section(self, section: Section, *, is_awaited: bool) -> float:
        """The limit of a section.

        Args:
            section: of a rank that waits for no other one.
            is_awaited: whether others wait for it; their waits would end by an error soon after this limit.
        """
        limit: float = getattr(self, section)
        if is_awaited:
            return min(limit, _OF_TIMEOUT * self.timeout_s)
        return math.inf if section == "script" else limit
