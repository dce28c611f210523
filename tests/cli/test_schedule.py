import re
from textwrap import dedent

import pytest

from hybridpp.schedule import SCHEDULES, load_schedule, one_f_one_b

SIZES = ("--stages", "2", "--microbatches", "3")


@pytest.fixture
def command():
    return "schedule"


def test_a_schedule_is_printed_by_time(printed):
    assert printed("1f1b", *SIZES) == dedent("""\
        rank 0 | 0F0 0F1 .   .   0B0 --- 0F2 0B1 --- .   0B2 ---
        rank 1 | .   1F0 1B0 --- 1F1 1B1 --- 1F2 1B2 --- .   .

        2 ranks, 2 stages, 3 micro-batches, 25.0 % idle, peak activations by rank 2 1
    """)


def test_the_number_of_chunks_can_be_chosen(printed):
    assert "2 ranks, 6 stages, 4 micro-batches" in printed(
        "interleaved", "--stages", "2", "--microbatches", "4", "--chunks", "3"
    )


def test_a_schedule_is_drawn_and_saved(printed, tmp_path):
    text = printed("zb-v", *SIZES, "--draw", "v.svg", "--save", "v.csv")
    assert text.endswith("\nwrote v.svg\nwrote v.csv\n")
    assert re.search(r">zb-v: [\d.]+ ms, [\d.]+ % idle<", (tmp_path / "v.svg").read_text())
    assert printed("v.csv") == text.partition("wrote")[0]


@pytest.mark.covering
@pytest.mark.parametrize("name", list(SCHEDULES))
@pytest.mark.parametrize("suffix", ["csv", "json"])
def test_what_was_saved_is_found_good(printed, name, suffix):
    text = printed(name, *SIZES, "--save", f"plan.{suffix}")
    (found,) = re.findall(r"^2 ranks.*$", text, re.MULTILINE)
    assert printed("check", f"plan.{suffix}") == f"OK: {found}\n"


def test_a_saved_schedule_is_the_same_schedule(printed, tmp_path):
    printed("1f1b", *SIZES, "--save", "plan.csv")
    assert load_schedule(tmp_path / "plan.csv") == one_f_one_b(2, 3)


def test_all_schedules_are_compared(printed):
    text = printed("--compare", "--stages", "4", "--microbatches", "8")
    rows = [[cell.strip() for cell in line.split("|")] for line in text.splitlines() if "|" in line]
    assert rows[0] == ["schedule", "ranks", "stages", "idle", "activations", "messages"]
    assert [row[0] for row in rows[1:]] == list(SCHEDULES)
    found = {row[0]: row[1:] for row in rows}
    # GPipe and 1F1B idle (p - 1) / (m + p - 1) and send an activation and a gradient over three borders.
    assert found["gpipe"] == ["4", "4", "27.3 %", "8.0", "6"]
    assert found["1f1b"] == ["4", "4", "27.3 %", "4.0", "6"]
    # Of the seven borders of a V with eight stages, one is within a rank.
    assert found["zb-v"][1:] == ["8", "5.9 %", "4.0", "12"]
    assert found["interleaved"][4] == "14"
    assert all(float(row[2].rstrip(" %")) < 27.3 for name, row in found.items() if name[0] in "iz")


def test_a_comparison_takes_chunks_where_schedules_choose(printed):
    text = printed("--compare", "--stages", "2", "--microbatches", "4", "--chunks", "3")
    stages = {row[0].strip(): row[2].strip() for line in text.splitlines() if len(row := line.split("|")) > 1}
    assert stages == {
        "schedule": "stages",
        "gpipe": "6",
        "1f1b": "2",
        "eager-1f1b": "2",
        "interleaved": "6",
        "zb-h1": "2",
        "zb-h2": "2",
        "interleaved-zb": "6",
        "zb-v": "4",
        "v-half": "4",
        "v-min": "4",
    }


@pytest.mark.parametrize(
    ("plan", "line"),
    [
        ("0F0,0B0\n1B0,1F0\n", r"hybridpp: 1B0 \(rank 1, position 0\) .*"),
        ("0F0,0F0,0B0\n", r"hybridpp: 0F0 \(rank 0, position 1\) .*"),
        ("0F0,0tea\n", r"hybridpp: .*'?0tea'?.*"),
    ],
)
def test_a_plan_that_does_not_run_is_refused_by_its_first_bad_cell(refused, tmp_path, plan, line):
    (tmp_path / "plan.csv").write_text(plan)
    assert re.fullmatch(line, refused("check", "plan.csv"))
    assert re.fullmatch(line, refused("plan.csv"))


USAGE = (
    "hybridpp: these arguments do not go together. Use hybridpp schedule NAME or hybridpp schedule FILE, with or "
    "without --draw and --save, hybridpp schedule check FILE, or hybridpp schedule --compare."
)


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        ([], USAGE),
        (["check"], USAGE),
        (["1f1b", "--compare", *SIZES], USAGE),
        (["1f1b", "zb-v", *SIZES], USAGE),
        (["--compare", *SIZES, "--draw", "x.svg"], USAGE),
        (["check", "plan.csv", "--save", "x.csv"], USAGE),
        (["check", "plan.csv", "--compare"], USAGE),
        (["1f1b", "--stages", "2"], "hybridpp: a named schedule needs sizes. Pass --stages and --microbatches."),
        (["--compare"], "hybridpp: a named schedule needs sizes. Pass --stages and --microbatches."),
        (["plan.csv"], "hybridpp: plan.csv cannot be read: no such file or directory."),
        (["check", "1f1b"], "hybridpp: a schedule's file is .csv or .json: got '1f1b'. Rename it."),
        (
            ["plan.csv", "--stages", "2"],
            "hybridpp: plan.csv determines the sizes. Remove --stages, --microbatches and --chunks.",
        ),
        (
            ["check", "plan.csv", "--chunks", "2"],
            "hybridpp: plan.csv determines the sizes. Remove --stages, --microbatches and --chunks.",
        ),
        (
            ["1f1b", *SIZES, "--draw", "picture.gif"],
            "hybridpp: a picture's file ends in one of .pdf, .png, .svg: got 'picture.gif'.",
        ),
        (
            ["1f1b", *SIZES, "--save", "none/plan.csv"],
            "hybridpp: none/plan.csv cannot be written: no such file or directory.",
        ),
    ],
)
def test_what_cannot_be_shown_is_one_line_and_exit_code_2(refused, arguments, line):
    assert refused(*arguments) == line


def test_an_unknown_name_lists_the_known_ones(refused):
    line = refused("tea", *SIZES)
    assert line.startswith("hybridpp: ")
    assert all(name in line for name in SCHEDULES)
