"""Cases that stand for a product of parameters."""

import inspect
from itertools import product

import pytest
from covering import kept, one_test_for

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


class Config:
    def __init__(self, is_matrix):
        self.getoption = {"--matrix": is_matrix}.get


@pytest.mark.parametrize("is_matrix", [False, True])
def test_one_test_runs_all_cases_but_those_of_the_matrix(is_matrix):
    found = []

    @one_test_for("a", [1, pytest.param(2, marks=pytest.mark.matrix)])
    @one_test_for(("b",), [5, 6])
    def check(a, b, others):
        found.append((a, b))
        assert others == "fixture"

    check(pytestconfig=Config(is_matrix), others="fixture")
    assert found == [*product([1, 2] if is_matrix else [1], [5, 6])]
    assert set(inspect.signature(check).parameters) == {"others", "pytestconfig"}


def test_a_failure_says_in_which_case():
    @one_test_for(("a", "b"), [(1, 1), pytest.param(1, 2, id="unequal"), (2, 2)])
    def check(a, b):
        assert a == b

    with pytest.raises(AssertionError) as caught:
        check(pytestconfig=Config(False))
    assert caught.value.__notes__ == ["in the case a, b = unequal"]
