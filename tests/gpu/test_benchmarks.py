"""The benchmarks of benchmarks/gpu run on the CPU, too, with tiny models: all of them but the device."""

import importlib
import json
import runpy
import sys

import pytest
from processes import run_script
from support import ROOT

FOLDER = ROOT / "benchmarks/gpu"


@pytest.fixture(autouse=True)
def beside_each_other(monkeypatch):
    """Scripts import what is in their folder."""
    monkeypatch.syspath_prepend(str(FOLDER))


@pytest.fixture
def lines(monkeypatch, capsys):
    """Runs a benchmark, and returns its lines of JSON by case."""

    def run(script, *arguments):
        monkeypatch.setattr(sys, "argv", [script, "--device", "cpu", "--tiny", "--here", *arguments])
        runpy.run_path(str(FOLDER / script), run_name="__main__")
        output = capsys.readouterr().out
        told = [json.loads(line) for line in output.splitlines() if line.startswith("{")]
        assert told[0]["case"] == "header"
        assert all(line["torch"] and line["device"].startswith("cpu") for line in told)
        table = [row.split(" | ")[0].strip() for row in output.splitlines()[-len(told) + 1 :]]
        assert table == [line["case"] for line in told[1:]]
        return {line["case"]: line for line in told[1:]}

    return run


def test_llama_beside_a_plain_loop(lines):
    told = lines("llama.py")
    assert set(told) == {"tiny, hybridpp", "tiny, autocast"}
    ours, plain = told.values()
    assert ours["loss"] == pytest.approx(plain["loss"], abs=2e-2), "both train the same model"
    assert ours["tokens per second"] > 0


# Dynamo looks at every attribute of an input, where warnings are errors.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")
def test_llama_with_compiled_blocks(lines):
    told = lines("llama.py", "--compile")
    eager, compiled = told.values()
    assert set(told) == {"tiny, hybridpp", "tiny, compiled blocks"}
    assert compiled["loss"] == pytest.approx(eager["loss"], abs=1e-2)


def test_a_vit_in_fp16_beside_two_loops(lines):
    told = lines("fp16.py")
    assert list(told) == [
        "tiny, time",
        *(f"tiny, memory, {name}" for name in ("hybridpp", "torch.amp", "fp16 by hand")),
    ]
    times = told["tiny, time"]
    assert times["hybridpp / torch.amp"] == pytest.approx(times["hybridpp (ms)"] / times["torch.amp (ms)"], abs=2e-3)


def test_launches_by_action(lines):
    told = lines("launches.py")
    assert list(told) == ["hybridpp", "fp16 by hand"]
    for line in told.values():
        assert len(line["forward (F)"]) == len(line["backward (B)"]) == 4


def test_memory_by_the_number_of_micro_batches(lines):
    told = lines("memory.py", "--schedules", "1f1b", "gpipe")
    assert list(told) == [f"ranks: 1, {schedule}, {n} micro-batches" for schedule in ("1f1b", "gpipe") for n in (2, 4)]
    assert all(line["step (ms)"] > 0 for line in told.values())


CASES = """
import argparse, time
from jobs import add_arguments, run_cases
parser = argparse.ArgumentParser()
add_arguments(parser)
args = parser.parse_args()
run_cases("some", {"good": lambda: {"ms": 1.5}, "bad": lambda: 1 / 0, "slow": lambda: time.sleep(1000)}, args)
"""


def test_a_case_that_hangs_or_fails_does_not_end_the_benchmark(tmp_path, monkeypatch, capsys):
    script = tmp_path / "some.py"
    script.write_text(CASES)
    monkeypatch.setenv("PYTHONPATH", str(FOLDER), prepend=":")
    jobs = importlib.import_module("jobs")
    results = {"good": ("ok", '{"benchmark": "some", "case": "good", "ms": 1.5}'), "bad": ("error", "division by zero")}
    before = jobs.outcome

    def outcome(command, environment, limit_s):
        # Only the last case takes the time of a process that starts.
        return results.get(command[-1]) or before(command, environment, limit_s)

    monkeypatch.setattr(jobs, "outcome", outcome)
    monkeypatch.setattr(sys, "argv", [str(script), "--limit", "3"])
    runpy.run_path(str(script), run_name="__main__")
    told = [json.loads(line) for line in capsys.readouterr().out.splitlines() if line.startswith("{")]
    assert [(line["case"], line.get("result")) for line in told[1:]] == [
        ("good", "ok"),
        ("bad", "error"),
        ("slow", "hang"),
    ]
    assert told[1]["ms"] == 1.5
    assert "division by zero" in told[2]["said"]


TESTS = """
import os, time, pytest
def test_passes(): pass
def test_fails(): assert 1 == 2
def test_hangs():
    print("here")
    time.sleep(1000)
@pytest.mark.skipif(True, reason="no device")
def test_is_skipped(): pass
def test_dies(): os._exit(3)
@pytest.mark.parametrize("n", [1])
def test_comes_last(n): pass
"""


def test_a_test_that_hangs_or_dies_is_a_result_of_its_own(tmp_path, monkeypatch):
    (tmp_path / "test_some.py").write_text(TESTS)
    run_tests = importlib.import_module("run_tests")
    monkeypatch.chdir(tmp_path)
    names = run_tests.collected(["test_some.py"], 60.0)
    found = {line["case"].partition("::")[2]: line for line in run_tests.run(names, 5.0)}
    assert {name: line["result"] for name, line in found.items()} == {
        "test_passes": "passed",
        "test_fails": "failed",
        "test_hangs": "hang",
        "test_is_skipped": "skipped",
        "test_dies": "died",
        "test_comes_last[1]": "passed",
    }
    assert "assert 1 == 2" in found["test_fails"]["said"]
    assert "here" in found["test_hangs"]["said"]
    assert "no device" in found["test_is_skipped"]["said"]
    with pytest.raises(SystemExit):
        run_tests.collected(["no_such_file.py"], 60.0)


def test_a_profile_tells_how_busy_the_device_is(lines, tmp_path):
    told = lines("profile_step.py", "--trace", str(tmp_path / "step.json"))
    assert set(told) == {"micro-batches of 1", "micro-batches of 2"}
    for line in told.values():
        assert 0 < line["busy"] <= 1
        assert len(line["gaps (ms)"]) == 5
        lengths = [length for length, _ in line["gaps (ms)"]]
        assert lengths == sorted(lengths, reverse=True)
    assert (tmp_path / "step.json").stat().st_size > 0


def test_busy_time_is_counted_once_and_gaps_by_length():
    profile_step = importlib.import_module("profile_step")
    interval = profile_step.Interval
    found = profile_step.summary(
        [interval(0, 1000, "a"), interval(500, 2000, "b"), interval(6000, 7000, "c"), interval(8000, 10000, "d")]
    )
    assert found == {"busy": 0.5, "step (ms)": 10.0, "gaps (ms)": [[4.0, "c"], [1.0, "d"]]}


def test_a_rank_of_the_nccl_jobs_gives_the_losses_of_one_process():
    nccl = importlib.import_module("nccl")
    arguments = ["--worker", "--device", "cpu", "--schedule", "zb-v", "--pp-size", "2", "--microbatches", "2"]
    job = run_script(2, FOLDER / "nccl.py", *arguments)
    alone = run_script(1, FOLDER / "nccl.py", "--worker", "--device", "cpu", "--microbatches", "2", "--bind")
    expected = json.loads(alone.stdout)
    assert len(expected) == nccl.NUM_STEPS
    assert nccl.judged("ok", job.stdout, expected)["result"] == "ok", job.stderr
    assert nccl.judged("ok", job.stdout, [number + 0.1 for number in expected])["result"] == "wrong"


@pytest.mark.parametrize(
    ("code", "status"), [("import time; print('x', flush=True); time.sleep(60)", "hang"), ("print('x'); 1/0", "error")]
)
def test_a_job_that_hangs_or_fails_is_a_result(code, status):
    nccl, jobs = importlib.import_module("nccl"), importlib.import_module("jobs")
    found, output = jobs.outcome([sys.executable, "-c", code], {}, 3.0 if status == "hang" else 60.0)
    assert found == status
    assert "x" in output
    assert nccl.judged(found, output, []) == {"result": status, "said": output[-400:]}


def test_jobs_with_one_micro_batch_come_first_and_one_device_runs_one_rank():
    nccl = importlib.import_module("nccl")
    assert [case.num_ranks for case in nccl.cases(1)] == [1]
    jobs = list(nccl.cases(2))
    singles = [place for place, case in enumerate(jobs) if ", 1 micro-batches" in case.name]
    assert singles == list(range(1, 1 + 4 * len(nccl.SCHEDULES)))
    assert {case.num_ranks for case in jobs} == {1, 2}
    variants = {(*case.environment.items(), "--bind" in case.arguments) for case in jobs}
    assert len(variants) == 5
