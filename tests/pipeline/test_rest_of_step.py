"""What a replica still takes part in after an error has ended its step."""

from types import SimpleNamespace

import pytest

from hybridpp.pipeline.executor import reduced_after
from hybridpp.pipeline.rank_program import rank_programs
from hybridpp.pipeline.rest_of_step import RestOfStep
from hybridpp.schedule import make_schedule


class Calls:
    """Notes what a step does with gradients and weights, as text."""

    def __init__(self):
        self.made = []

    def __getattr__(self, name):
        return lambda *args, **options: self.made.append(" ".join([name, *map(str, (*args, *options.values()))]))


def rest(schedule, position, *, has_passed=False, by_unit=True, own=2, settles=False, **options):
    """The calls of the rest of a program of two micro-batches, from a position on."""
    [program] = rank_programs(make_schedule(schedule, 1, 2), num_microbatches=own, **options)
    calls = Calls()
    step = SimpleNamespace(
        microbatches=[None] * own,
        weights=calls if by_unit else None,
        begin_last_backward=calls.begin_last_backward,
        reduce_gradients=calls.reduce_gradients,
        settle=calls.settle if settles else lambda: None,
    )
    found = RestOfStep(
        program.actions, position, step, reduced_after=reduced_after(program.actions), has_passed=has_passed
    )
    found.run()
    return calls.made


def test_what_the_first_loss_exchanges_comes_where_that_loss_is_made():
    gathers, reduces = "gather_as_others False", ["begin_last_backward 0 ()", "reduce_gradients 0"]
    assert rest("gpipe", 0, settles=True)[:4] == [gathers, "settle", gathers, "settle"]
    assert rest("1f1b", 0, by_unit=False, settles=True) == ["settle", "settle", *reduces]


def test_gradients_are_reduced_after_the_last_action_or_after_each():
    for each, expected in ((False, {"0B1"}), (True, {"0B0", "0B1"})):
        [program] = rank_programs(make_schedule("1f1b", 1, 2), reduces_each=each)
        assert {str(action) for action in reduced_after(program.actions)} == expected
    [program] = rank_programs(make_schedule("zb-h1", 1, 2))
    assert {str(action) for action in reduced_after(program.actions)} == {"0W1"}


@pytest.mark.parametrize(
    ("position", "expected"),
    [
        (0, ["begin_last_backward 0 ()", "reduce_gradients 0"]),
        (2, ["begin_last_backward 0 ()", "reduce_gradients 0"]),
        (3, ["reduce_gradients 0"]),  # the backward pass that the error ended had begun
        (4, ["reduce_gradients 0"]),
    ],
)
def test_the_reduction_of_a_step_is_completed(position, expected):
    assert rest("1f1b", position, by_unit=False) == expected


def test_each_pass_gathers_and_reduces():
    settings = {"max_unsharded": 1, "reduces_each": True}
    gather, gather_back = "gather_as_others False", "gather_as_others True"
    first = [gather, "begin_last_backward 0 ()", gather_back, "reduce_gradients 0"]
    second = [*first[:3], "reshard 0", first[3]]
    found = rest("1f1b", 1, **settings)
    assert found == first + second
    # A criterion raised, behind the forward pass.
    assert rest("1f1b", 1, has_passed=True, **settings) == found[1:]


def test_micro_batches_of_other_replicas_come_with_the_rest():
    settings = {"max_unsharded": 1, "reduces_each": True}
    assert sorted(rest("1f1b", 1, own=1, **settings)) == sorted(rest("1f1b", 1, own=2, **settings))
