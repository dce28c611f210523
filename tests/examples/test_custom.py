"""The example with stage numbers, at its own layout: two stages, four replicas."""

import re

from processes import run_script
from support import ROOT

SCRIPT = ROOT / "examples/custom/train.py"


def test_eight_processes_hold_what_the_numbers_say_and_learn():
    job = run_script(8, SCRIPT, "--epochs", "2", "--num-samples", "256", "--width", "16")
    assert job.returncode == 0, job.stderr
    held = {0: "head, layer1, layer2", 1: "layer3, layer4, fc"}
    for rank in range(8):
        assert f"rank {rank}: stage {rank % 2} of 2, replica {rank // 2} of 4: {held[rank % 2]}\n" in job.stdout
    first, last = map(float, re.findall(r"Epoch \[\d\]: loss ([\d.]+)", job.stdout))
    assert last < first


def test_one_process_needs_no_stages():
    job = run_script(1, SCRIPT, "--epochs", "1", "--num-samples", "64", "--width", "8")
    assert job.returncode == 0, job.stderr
    assert "stage 0 of 1, replica 0 of 1: head, layer1, layer2, layer3, layer4, fc" in job.stdout
