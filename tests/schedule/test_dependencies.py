import pytest

from hybridpp.schedule import Action, ActionKind, gpipe, one_f_one_b
from hybridpp.schedule.dependencies import StartEnd, count_stages, earliest_times, needs, walk

LETTERS = {str(kind): kind for kind in ActionKind}


def action(text):
    return Action(int(text[0]), LETTERS[text[1]], int(text[2:]))


@pytest.mark.parametrize(
    ("text", "needed"),
    [
        ("0F3", []),
        ("1F3", ["0F3"]),
        ("1B3", ["1F3", "2I3"]),
        ("1I3", ["1F3", "2I3"]),
        ("2B3", ["2F3"]),
        ("1W3", ["1I3"]),
    ],
)
def test_an_action_needs_its_input_and_the_gradient_of_its_output(text, needed):
    assert [str(need) for need in needs(action(text), 3)] == needed


@pytest.mark.parametrize("make", [gpipe, one_f_one_b])
def test_a_walk_yields_every_action_after_those_it_needs(make):
    programs = make(3, 4)
    seen = set()
    for rank, position in walk(programs):
        current = programs[rank][position]
        produced = {need._replace(kind=ActionKind.BACKWARD) if need.kind == "I" else need for need in needs(current, 3)}
        assert produced <= seen
        seen.add(current)
    assert seen == {current for program in programs for current in program}


def test_a_walk_ends_where_programs_deadlock():
    programs = ((action("0F0"), action("0B0")), (action("1B0"), action("1F0")))
    assert list(walk(programs)) == [(0, 0)]


def test_stages_are_counted_by_the_highest():
    assert count_stages(((action("0F0"),), (action("3F0"),))) == 4
    assert count_stages(()) == 0


def test_each_action_runs_as_early_as_its_rank_and_its_data_allow():
    durations = {ActionKind.FORWARD: 1, ActionKind.BACKWARD: 3}
    intervals = earliest_times(one_f_one_b(2, 2), durations)
    found = {str(action): (interval.start, interval.end) for action, interval in intervals.items()}
    assert found == {
        "0F0": (0, 1),
        "0F1": (1, 2),
        "1F0": (1, 2),
        "1B0": (2, 5),
        "1F1": (5, 6),
        "0B0": (5, 8),
        "1B1": (6, 9),
        "0B1": (9, 12),
    }


def test_what_never_runs_has_no_time():
    programs = ((action("0B0"), action("0F0")), (action("1F0"), action("1B0")))
    assert earliest_times(programs) == {}
    assert earliest_times(programs[::-1]) == {}
    assert earliest_times(((action("0F0"), action("0B0")),)) == {
        action("0F0"): StartEnd(0, 1),
        action("0B0"): StartEnd(1, 3),
    }
