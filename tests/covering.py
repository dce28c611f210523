"""Of the cases of a test that is marked ``covering``, those that the suite runs; ``make matrix`` runs all of them."""

from collections import Counter
from collections.abc import Hashable, Sequence

import pytest


def kept(cases: Sequence[dict[str, Hashable]], together: Sequence[str] = ()) -> list[int]:
    """Numbers of cases in which every value of every parameter occurs: few, always the same ones, and mixed.

    Args:
        cases: value by name of parameter.
        together: names of parameters in one string, as ``"layout precision"``: every combination of their values that
            there is occurs, too.
    """
    groups = [*([name] for name in cases[0]), *(names.split() for names in together)] if cases else []
    shown = [{(*names, *(case[name] for name in names)) for names in groups} for case in cases]
    missing: set[tuple[Hashable, ...]] = set().union(*shown)
    times: Counter[tuple[Hashable, ...]] = Counter()
    found = []
    while missing:
        # Of those that show as much, the one whose values have been shown least.
        best = max(range(len(cases)), key=lambda n: (len(shown[n] & missing), -sum(times[each] for each in shown[n])))
        missing -= shown[best]
        times.update(shown[best])
        found.append(best)
    return sorted(found)


def left_to_the_matrix(items: Sequence[pytest.Item]) -> list[pytest.Item]:
    """What the suite leaves out: cases of tests that are marked ``covering``, and all that is marked ``matrix``."""
    by_test: dict[tuple[object, str], list[pytest.Function]] = {}
    for item in items:
        if isinstance(item, pytest.Function) and item.get_closest_marker("covering"):
            by_test.setdefault((item.parent, item.originalname), []).append(item)
    left = [item for item in items if item.get_closest_marker("matrix")]
    for cases in by_test.values():
        marker = cases[0].get_closest_marker("covering")
        values = [{name: _key(value) for name, value in case.callspec.params.items()} for case in cases]
        numbers = set(kept(values, marker.args))
        left += [case for number, case in enumerate(cases) if number not in numbers]
    return left


def _key(value: object) -> Hashable:
    """Of a value that may be a dict or a list."""
    return (type(value), value) if isinstance(value, str | int | float | None) else repr(value)
