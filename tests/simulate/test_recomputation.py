from hybridpp.schedule import gpipe, interleaved
from hybridpp.simulate import Costs
from hybridpp.simulate.recomputation import cheapest_stages, least_bytes, peaks_with_recomputation, reserved_bytes

# Two stages on each of two ranks: 0 and 2, 1 and 3. Stage 2 saves the same for less time.
COSTS = Costs(num_stages=4, activation_bytes=10.0, recomputed_bytes=1.0, recompute_ms=(2.0, 1.0, 1.0, 3.0))
PROGRAMS = gpipe(2, 3, 2)


def test_the_peak_has_what_is_computed_again():
    assert peaks_with_recomputation(PROGRAMS, COSTS, frozenset()) == (60, 60)
    assert peaks_with_recomputation(PROGRAMS, COSTS, frozenset({0})) == (3 + 30 + 9, 60)
    assert reserved_bytes(COSTS, (0, 2), frozenset({0, 2})) == 9


def test_the_cheapest_stages_of_each_rank_recompute():
    assert cheapest_stages(PROGRAMS, COSTS, (60, 60)) == frozenset()
    assert cheapest_stages(PROGRAMS, COSTS, (42, 60)) == {2}
    assert cheapest_stages(PROGRAMS, COSTS, (42, 42)) == {1, 2}
    assert cheapest_stages(PROGRAMS, COSTS, (15, 60)) == {0, 2}
    assert cheapest_stages(PROGRAMS, COSTS, (14, 60)) is None


def test_a_stage_that_turns_out_to_be_unneeded_is_left_out():
    # Stage 0 saves more per millisecond, but too little; with stage 2 it is not needed.
    costs = Costs(
        num_stages=4, activation_bytes=(2.0, 0.0, 20.0, 0.0), recomputed_bytes=0.0, recompute_ms=(0.01, 0, 5.0, 0)
    )
    programs = interleaved(2, 2)
    full, _ = peaks_with_recomputation(programs, costs, frozenset())
    assert cheapest_stages(programs, costs, (full - 20, 0)) == {2}


def test_without_recomputation_a_schedule_fits_or_does_not():
    costs = Costs(num_stages=4, activation_bytes=10.0)
    assert cheapest_stages(PROGRAMS, costs, (60, 60)) == frozenset()
    assert cheapest_stages(PROGRAMS, costs, (59, 60)) is None
    assert least_bytes(PROGRAMS[0], costs) == 60
    assert least_bytes(PROGRAMS[0], COSTS) == 15
