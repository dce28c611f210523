"""Of the cases of a test that is marked ``covering``, those that the suite runs; ``make matrix`` runs all of them.

And cases of pure checks, of which one test runs all: a test of its own costs each case more than what it checks.
"""

import functools
import inspect
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any

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


def one_test_for(names: str | Sequence[str], cases: Iterable[Any]) -> Callable[[Callable[..., None]], Any]:
    """As ``pytest.mark.parametrize``, but one test runs all cases; a failure says in which case.

    For checks of a few milliseconds that need no fixtures for each case. Cases that are marked ``matrix`` are run with
    ``--matrix``, as elsewhere.
    """
    names = [name.strip() for name in names.split(",")] if isinstance(names, str) else list(names)
    every = [_case(names, case) for case in cases]

    def decorate(check: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(check)
        def test(*, pytestconfig: pytest.Config, **others: Any) -> None:
            if "pytestconfig" in needed:
                others["pytestconfig"] = pytestconfig
            ran = [case for case in every if not case[2] or pytestconfig.getoption("--matrix")]
            assert ran, f"{check.__name__} has no cases"
            for values, label, _ in ran:
                try:
                    check(**values, **others)
                except BaseException as error:
                    error.add_note(f"in the case {', '.join(names)} = {label}")
                    raise

        needed = inspect.signature(check).parameters
        others = [name for name in needed if name not in names]
        test.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
            [
                inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY)
                for name in dict.fromkeys([*others, "pytestconfig"])
            ]
        )
        return test

    return decorate


def _case(names: Sequence[str], case: Any) -> tuple[dict[str, Any], str, bool]:
    """The values by name, what the case is called, and whether it is left to the matrix."""
    is_param = hasattr(case, "marks")
    values = case.values if is_param else case if len(names) > 1 else (case,)
    label = case.id if is_param and case.id else ", ".join(map(repr, values))
    is_of_matrix = is_param and any(mark.name == "matrix" for mark in case.marks)
    return dict(zip(names, values, strict=True)), label, is_of_matrix


def _key(value: object) -> Hashable:
    """Of a value that may be a dict or a list."""
    return (type(value), value) if isinstance(value, str | int | float | None) else repr(value)
