"""A problem, as it is told."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class Problem:
    """Something that breaks or slows a job.

    Attributes:
        level: error: a job fails or computes elsewhere than meant; warning: it may fail, or is slow; hint: it could be
            faster, or is worth knowing.
        what: the rule and the values, in a sentence.
        way_out: what to do.
    """

    level: Literal["error", "warning", "hint"]
    what: str
    way_out: str
