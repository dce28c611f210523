import json
import re
from textwrap import dedent

import pytest

from hybridpp.schedule import one_f_one_b
from hybridpp.simulate import Costs, simulate

SIZES = ("--stages", "4", "--microbatches", "8")


@pytest.fixture
def command():
    return "simulate"


def test_the_table(printed):
    text = printed("1f1b", *SIZES, "--forward-ms", "10", "--backward-ms", "20", "--activation-bytes", "1048576")
    assert text == dedent("""\
        rank | busy ms |   idle | activations | MiB held
        -----+---------+--------+-------------+---------
        0    |   240.0 | 27.3 % |           4 |      4.0
        1    |   240.0 | 27.3 % |           3 |      3.0
        2    |   240.0 | 27.3 % |           2 |      2.0
        3    |   240.0 | 27.3 % |           1 |      1.0

        step: 330.0 ms, 27.3 % idle
    """)


def test_a_heavy_last_stage_costs_zero_bubble_v_its_advantage(printed):
    sizes = ("--stages", "4", "--microbatches", "16")
    heavy = ("1,1,1,1,1,1,1,1.5",)
    assert printed("zb-v", *sizes).endswith("step: 99.0 ms, 3.0 % idle\n")
    flags = ("--forward-ms", *heavy, "--input-gradient-ms", *heavy, "--weight-gradient-ms", *heavy)
    assert float(printed("zb-v", *sizes, *flags).split(", ")[-1].split()[0]) == pytest.approx(16, abs=1)


def test_messages_take_time(printed):
    free, slow = (printed("1f1b", *SIZES, "--send-ms", send) for send in ("0", "0.5"))
    assert "step: 33.0 ms" in free
    # Each of the seven later micro-batches also waits on its way there and back.
    assert float(slow.split("step: ")[1].split()[0]) > 33 + 3


def test_costs_come_from_a_file(printed, tmp_path):
    costs = Costs(num_stages=4, forward_ms=(1.0, 1.0, 1.0, 2.0), send_ms=(0.1, 0.2, 0.3))
    (tmp_path / "costs.json").write_text(costs.to_json())
    makespan_ms = simulate(one_f_one_b(4, 8), costs).timeline.makespan_ms
    assert f"step: {makespan_ms:.1f} ms" in printed("1f1b", *SIZES, "--costs", "costs.json")


def test_a_measured_run_of_the_same_schedule_says_how_steps_scatter(printed, tmp_path):
    run = simulate(one_f_one_b(4, 8), Costs(num_stages=4, forward_ms=3.0, backward_ms=8.0))
    (tmp_path / "run.json").write_text(run.timeline.to_json())
    text = printed("1f1b", *SIZES, "--measured", "run.json")
    assert text.endswith("with times that vary as measured: 121.0 ms; 95 % of steps take at most 121.0\n")
    assert "scatter" not in printed("zb-h1", *SIZES, "--measured", "run.json")


def test_a_measured_run_gives_the_costs_of_a_schedule_and_is_drawn_above(printed, tmp_path):
    costs = Costs(num_stages=4, forward_ms=3.0, backward_ms=8.0)
    (tmp_path / "run.json").write_text(simulate(one_f_one_b(4, 8), costs).timeline.to_json())
    text = printed("zb-h1", *SIZES, "--measured", "run.json", "--draw", "both.svg")
    assert "|    88.0 |" in text
    assert text.endswith("\nwrote both.svg\n")
    picture = (tmp_path / "both.svg").read_text()
    assert 0 < picture.index(">measured: 121 ms, 27.3 % idle<") < picture.index(">zb-h1: ")


def test_a_trace_for_perfetto_is_written(printed, tmp_path):
    assert printed("zb-v", *SIZES, "--trace", "trace.json").endswith("\nwrote trace.json\n")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert len([event for event in events if event["ph"] == "X"]) == 8 * 8 * 3


def test_a_plan_of_a_file_is_simulated(printed, tmp_path):
    (tmp_path / "plan.csv").write_text("0F0,0I0,0W0\n1F0,1I0,1W0\n")
    assert "step: 5.0 ms" in printed("plan.csv")


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (
            ["1f1b", *SIZES, "--forward-ms", "1,2"],
            "hybridpp: forward_ms has 2 numbers for 4 stages. Give 4, or one number (not a list) for all.",
        ),
        (
            ["1f1b", *SIZES, "--send-ms=-1"],
            "hybridpp: send_ms must be a number of at least 0, or one per stage: got -1.0.",
        ),
        (
            ["1f1b", *SIZES, "--forward-ms", "1", "--costs", "costs.json"],
            "hybridpp: costs need one source: got --costs and the times. Remove one.",
        ),
        (
            ["1f1b", *SIZES, "--costs", "costs.json"],
            "hybridpp: costs.json cannot be read: no such file or directory.",
        ),
        (["zb-v"], "hybridpp: a named schedule needs sizes. Pass --stages and --microbatches."),
        (
            ["1f1b", *SIZES, "--trace", "none/trace.json"],
            "hybridpp: none/trace.json cannot be written: no such file or directory.",
        ),
    ],
)
def test_what_cannot_be_simulated_is_one_line_and_exit_code_2(refused, arguments, line):
    assert refused(*arguments) == line


def test_costs_measured_with_other_stages_do_not_fit(refused, tmp_path):
    (tmp_path / "run.json").write_text(simulate(one_f_one_b(4, 8), Costs(num_stages=4)).timeline.to_json())
    line = "hybridpp: the schedule has 8 stages, the costs are for 4. Give costs for each stage."
    assert refused("zb-v", *SIZES, "--measured", "run.json") == line


def test_what_is_no_number_is_refused_by_its_flag(refused):
    assert refused("1f1b", *SIZES, "--forward-ms", "1,tea") == (
        "hybridpp: invalid value for '--forward-ms': '1,tea' is not a number, or one per stage as in 1,1,1,1.5."
    )


UNEVEN = ("--forward-ms", "1,1,1,2", "--activation-bytes", "1048576")


def test_a_search_finds_a_schedule_and_saves_it(printed, tmp_path):
    flags = ("--stages", "4", "--microbatches", "8", *UNEVEN)
    text = printed("--search", *flags, "--memory", "3MiB", "--save", "best.csv")
    name, step_ms = re.match(r"found: (.+), ([\d.]+) ms, at most [\d.]+ % above the shortest possible", text).groups()
    assert f"step: {step_ms} ms" in text
    assert "wrote best.csv" in text
    again = printed("best.csv", *UNEVEN)
    assert f"step: {step_ms} ms" in again
    held = [float(line.split("|")[4]) for line in again.splitlines() if re.match(r"\d+ +\|", line)]
    assert max(held) <= 3
    assert name


def test_a_search_says_which_stages_recompute(printed, tmp_path):
    costs = Costs(num_stages=2, activation_bytes=1024, recompute_ms=0.5, recomputed_bytes=128)
    (tmp_path / "costs.json").write_text(costs.to_json())
    flags = ("--stages", "2", "--microbatches", "4", "--costs", "costs.json", "--memory", "1.5KiB")
    text = printed("--search", *flags)
    assert "stages that recompute: 0 (num_ckpt_layers_per_stage: all, 0)" in text


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ((), "there is nothing to simulate. Name a schedule or a file, or pass --search."),
        (("1f1b", "--search"), "--search finds a schedule: got 1f1b, too. Leave one of them out."),
        (("1f1b", "--memory", "1KiB"), "--memory is for a search: got it with 1f1b."),
        (("--search",), "a named schedule needs sizes. Pass --stages and --microbatches."),
        (("--search", "--stages", "2", "--microbatches", "2", "--memory", "much"), "--memory"),
        (
            ("--search", "--stages", "2", "--microbatches", "2", "--activation-bytes", "9", "--memory", "4B"),
            "no schedule fits: rank",
        ),
    ],
)
def test_a_search_that_cannot_be_is_refused(refused, flags, message):
    assert message in refused(*flags)
