import pytest

from hybridpp.schedule import SCHEDULES, check_program, peak_activations, placement
from hybridpp.simulate.candidates import known_schedules, one_microbatch, placements


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
@pytest.mark.parametrize("num_chunks", [1, 2, 3])
def test_known_schedules_have_the_stages_and_a_placement_that_is_searched(num_ranks, num_chunks):
    found = dict(known_schedules(num_ranks, num_chunks, 3))
    for programs in found.values():
        check_program(programs, num_ranks * num_chunks, 3)
        assert placement(programs) in (*placements(num_ranks, num_chunks), (0,) * num_chunks)
    named = {entry.name for entry in SCHEDULES.values() if entry.num_chunks == num_chunks or entry.takes_chunks}
    assert named <= set(found)
    assert (len(found) > len(named)) == (num_chunks == 2)


def test_one_microbatch_holds_every_stage_once():
    programs = one_microbatch((0, 1, 1, 0))
    check_program(programs, 4, 1)
    assert peak_activations(programs) == (2, 2)
