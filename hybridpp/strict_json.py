"""JSON that anyone may have written: no key twice, finite numbers only, and errors in words. No torch."""

import json
import math
from typing import Any


def parse_strictly(text: str | bytes) -> Any:
    """The value that JSON stands for.

    Raises:
        ValueError: it is no JSON, is nested too deep to be read, names a key twice, or has a number that is not finite.
    """
    try:
        return json.loads(
            text,
            object_pairs_hook=_without_repeats,
            parse_constant=_refuse_constant,
            parse_float=_finite,
        )
    except RecursionError:
        raise ValueError("it is nested too deep") from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"it is no JSON: {error}") from None


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"the key {next(name for name in names if names.count(name) > 1)!r:.80} is there twice")
    return found


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is there, which is no number of JSON")


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{text[:40]} is there, which is too large for a number")
    return number
