"""Parsers of numeric flags."""

from argparse import ArgumentTypeError


def positive(text: str) -> int:
    """An integer of at least 1."""
    if not text.isdecimal() or int(text) < 1:
        raise ArgumentTypeError(f"{text!r} is not an integer of at least 1")
    return int(text)


def per_stage(text: str) -> float | tuple[float, ...]:
    """One number for all stages, or one per stage, separated by commas."""
    try:
        values = tuple(float(number) for number in text.split(","))
    except ValueError:
        raise ArgumentTypeError(f"{text!r} is not a number, or one per stage as in 1,1,1,1.5") from None
    return values if "," in text else values[0]
