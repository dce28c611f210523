import re

import pytest
from covering import one_test_for

from hybridpp.errors import ScheduleError
from hybridpp.schedule import (
    SCHEDULES,
    check_program,
    find_schedule,
    gpipe,
    interleaved,
    interleaved_zero_bubble,
    make_schedule,
    one_f_one_b,
    placement,
    stages_placement,
    zb_h1,
    zb_v,
)


def test_every_name_makes_its_schedule():
    names = "gpipe 1f1b eager-1f1b interleaved zb-h1 zb-h2 interleaved-zb zb-v v-half v-min"
    assert list(SCHEDULES) == names.split()
    assert all(entry.name == name and entry.summary for name, entry in SCHEDULES.items())
    assert make_schedule("gpipe", 3, 4) == gpipe(3, 4)
    assert make_schedule("gpipe", 3, 4, 2) == gpipe(3, 4, 2)
    assert make_schedule("1f1b", 3, 4, 1) == one_f_one_b(3, 4)
    assert make_schedule("interleaved", 3, 4) == interleaved(3, 4, 2)
    assert make_schedule("interleaved", 3, 4, 3) == interleaved(3, 4, 3)
    assert make_schedule("zb-h1", 3, 4) == zb_h1(3, 4)
    assert make_schedule("interleaved-zb", 3, 4, 3) == interleaved_zero_bubble(3, 4, 3)
    assert make_schedule("zb-v", 3, 4) == zb_v(3, 4)


@one_test_for("name", SCHEDULES)
@one_test_for("num_ranks", [1, 2, 3])
@one_test_for("num_chunks", [None, 1, 3])
def test_the_placement_is_that_of_the_programs(name, num_ranks, num_chunks):
    if num_chunks and not SCHEDULES[name].takes_chunks:
        num_chunks = SCHEDULES[name].num_chunks
    programs = make_schedule(name, num_ranks, 4, num_chunks)
    assert stages_placement(name, num_ranks, num_chunks) == placement(programs)
    check_program(programs, num_ranks * SCHEDULES[name].choose_chunks(num_chunks), 4)


@one_test_for(
    ("written", "name"),
    [
        ("GPipe", "gpipe"),
        ("1F1B", "1f1b"),
        ("Interleaved", "interleaved"),
        ("interleaved_1f1b", "interleaved"),
        ("Interleaved1F1B", "interleaved"),
        ("zbv", "zb-v"),
        ("ZB_V", "zb-v"),
        ("ZBVZeroBubble", "zb-v"),
        ("zbh1", "zb-h1"),
        ("interleaved_zb", "interleaved-zb"),
        ("InterleavedZeroBubble", "interleaved-zb"),
        ("LoopedBFS", "gpipe"),
        ("PipelineDriverFillDrain", "gpipe"),
        ("PipelineDriver1F1B", "1f1b"),
        ("PipelineDriverInterleaved1F1B", "interleaved"),
    ],
)
def test_names_may_be_written_in_several_ways(written, name):
    assert find_schedule(written) is SCHEDULES[name]


def test_an_unknown_name_lists_the_valid_ones():
    names = (
        "'gpipe', '1f1b', 'eager-1f1b', 'interleaved', 'zb-h1', 'zb-h2', 'interleaved-zb', 'zb-v', 'v-half', 'v-min'"
    )
    text = f"unknown schedule 'dualpipe'. Use one of {names}."
    with pytest.raises(ScheduleError, match=f"^{re.escape(text)}$"):
        make_schedule("dualpipe", 2, 4)


@pytest.mark.parametrize(
    ("name", "num_chunks", "text"),
    [
        (
            "1f1b",
            2,
            "schedule '1f1b' has 1 stage per rank: got num_model_chunks=2. Leave it out, or use one of 'gpipe', "
            "'interleaved', 'interleaved-zb'.",
        ),
        ("zbv", 1, "schedule 'zb-v' has 2 stages per rank: got num_model_chunks=1. Leave it out, or"),
        ("interleaved", 0, "a rank needs at least one stage: got num_model_chunks=0. Use 1 or more."),
    ],
)
def test_numbers_of_chunks_that_a_schedule_cannot_have(name, num_chunks, text):
    with pytest.raises(ScheduleError, match=f"^{re.escape(text)}"):
        make_schedule(name, 2, 4, num_chunks)
    with pytest.raises(ScheduleError, match=f"^{re.escape(text)}"):
        stages_placement(name, 2, num_chunks)


@pytest.mark.parametrize(
    ("name", "ours"),
    [
        ("Schedule1F1B", "1f1b"),
        ("ScheduleGPipe", "gpipe"),
        ("ScheduleInterleaved1F1B", "interleaved"),
        ("ScheduleInterleavedZeroBubble", "interleaved-zb"),
        ("ScheduleLoopedBFS", "gpipe"),
        ("ScheduleZBVZeroBubble", "zb-v"),
    ],
)
def test_the_classes_of_torch_have_names_here(name, ours):
    import torch.distributed.pipelining.schedules as theirs

    assert isinstance(getattr(theirs, name), type)
    assert find_schedule(name).name == ours
