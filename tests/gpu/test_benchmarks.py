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
        monkeypatch.setattr(sys, "argv", [script, "--device", "cpu", "--tiny", *arguments])
        runpy.run_path(str(FOLDER / script), run_name="__main__")
        told = [json.loads(line) for line in capsys.readouterr().out.splitlines() if line.startswith("{")]
        assert told[0]["case"] == "header"
        assert told[0]["torch"]
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


def test_a_profile_tells_how_busy_the_device_is(lines, tmp_path):
    told = lines("profile_step.py", "--trace", str(tmp_path / "step.json"))
    assert set(told) == {"micro-batches of 1", "micro-batches of 2"}
    for line in told.values():
        assert 0 < line["busy"] <= 1
        assert len(line["gaps (ms)"]) == 5
        assert line["gaps (ms)"] == sorted(line["gaps (ms)"], reverse=True)
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
    nccl = importlib.import_module("nccl")
    found, output = nccl.outcome([sys.executable, "-c", code], {}, 3.0 if status == "hang" else 60.0)
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
