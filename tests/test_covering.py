"""Cases that stand for a product of parameters."""

from itertools import product

import pytest
from covering import kept

CASES = [dict(zip(("schedule", "precision", "size"), case, strict=True)) for case in product("abcd", "xyz", (1, 2))]


def shown(names, cases):
    return {tuple(case[name] for name in names) for case in cases}


@pytest.mark.parametrize(("together", "number"), [([], 4), (["precision size"], 6), (["schedule precision"], 12)])
def test_every_value_and_every_combination_that_is_asked_for_occurs(together, number):
    found = [CASES[index] for index in kept(CASES, together)]
    for names in (["schedule"], ["precision"], ["size"], *(each.split() for each in together)):
        assert shown(names, found) == shown(names, CASES)
    assert len(found) == number


def test_values_are_mixed_and_a_single_case_is_kept():
    found = [CASES[index] for index in kept(CASES)]
    assert sorted(case["size"] for case in found) == [1, 1, 2, 2]
    assert kept(CASES[5:6]) == [0]
    assert kept([]) == []


def test_the_suite_leaves_out_cases_and_the_matrix_does_not(pytestconfig, request):
    for item in request.session.items:
        assert pytestconfig.getoption("--matrix") or not item.get_closest_marker("matrix")
