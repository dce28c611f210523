"""Sizes: of memory, as text (``16GiB``), and the largest of a schedule."""

import re
from fractions import Fraction
from typing import Any

from hybridpp.errors import ConfigError

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")
_FACTORS = {unit.lower(): 1024**power for power, unit in enumerate(_UNITS)}
_FACTORS |= {unit.replace("i", "").lower(): 1000**power for power, unit in enumerate(_UNITS)}


# More is a mistake, and numbers far above it are no floats.
_MOST_BYTES = 2**63
MAX_PASSES = 2**17
"""How many forward passes a schedule may have, over all of its stages: it is made and checked action by action."""


def parse_bytes(name: str, value: Any) -> int:
    """A number of bytes, from an int or from text with a binary (``GiB``) or decimal (``GB``) unit.

    Args:
        name: the setting's name, for the message.
        value: the setting's value.

    Raises:
        ConfigError: ``value`` is not a size above 0, or one that no memory has.

    Example:
        >>> parse_bytes("memory_limit", "1.5GiB")
        1610612736
    """
    size = None
    if isinstance(value, int) and not isinstance(value, bool):
        size = value
    elif isinstance(value, str):
        found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-z]+)\s*", value, re.IGNORECASE)
        if found and found[2].lower() in _FACTORS:
            size = int(Fraction(found[1]) * _FACTORS[found[2].lower()])
    if size is None or not 0 < size <= _MOST_BYTES:
        raise ConfigError(
            f"{name} must be a number of bytes above 0, or text with a unit (B, KB, KiB, MB, MiB, GB, GiB, TB, TiB), "
            f"and at most 2**63: got {name}={value!r}. Write, for example, {name}='16GiB'."
        )
    return size


def format_bytes(size: float) -> str:
    """A size in the largest binary unit that gives at least 1, rounded up so that it suffices as a memory limit.

    Example:
        >>> format_bytes(1610612737)
        '1.51 GiB'
    """
    power = 0
    while power + 1 < len(_UNITS) and size >= 1024 ** (power + 1):
        power += 1
    if not power:
        return f"{int(size)} B"
    hundredths = -(-int(size) * 100 // 1024**power)
    return f"{hundredths // 100}.{hundredths % 100:02d} {_UNITS[power]}"
