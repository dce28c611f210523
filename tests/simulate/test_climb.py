from unittest.mock import Mock

from hybridpp.simulate.climb import climb, starts
from hybridpp.simulate.greedy import Order, Rules

BEGIN = [Rules(rank_of=(0, 1, 2), in_flight=(1, 1, 1), num_unsplit=(0, 0, 0))]


def distance(rules):
    """From rules that no start has."""
    wanted = zip(rules.in_flight + rules.num_unsplit, (5, 4, 3, 2, 1, 0), strict=True)
    return sum(abs(value - aim) for value, aim in wanted) + 4 * (rules.order is not Order.FORWARD)


def test_it_climbs_and_finds_the_same_again():
    best = climb(distance, iter(BEGIN), 8, 300)
    assert distance(best[0]) == min(map(distance, best)) <= 1 < distance(BEGIN[0])
    assert best == climb(distance, iter(BEGIN), 8, 300)


def test_the_number_of_trials_is_kept():
    for num_trials in (0, 1, 2, 7):
        score = Mock(side_effect=distance)
        best = climb(score, starts(((0, 1, 2),), 3, 8), 8, num_trials)
        assert score.call_count == len({call.args for call in score.call_args_list}) == num_trials
        assert len(best) == min(3, num_trials)


def test_changed_rules_stay_possible():
    tried = []
    climb(lambda rules: tried.append(rules) or distance(rules), iter(BEGIN), 4, 200)
    assert all(1 <= number <= 4 for rules in tried for number in rules.in_flight)
    assert all(0 <= number <= 4 for rules in tried for number in rules.num_unsplit)


def test_starts_are_different_and_possible():
    rules = list(starts(((0, 1, 0, 1), (0, 1, 1, 0)), 2, 1))
    assert all(number == 2 for one in rules for number in one.in_flight)
    assert {one.rank_of for one in rules} == {(0, 1, 0, 1), (0, 1, 1, 0)}
