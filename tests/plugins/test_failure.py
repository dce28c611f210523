"""A rank that raises takes the whole job down, and its own traceback comes first."""

import os
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_a_rank_that_raises_ends_the_job_within_30_seconds_with_its_traceback_first():
    started = time.monotonic()
    job = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4"]
        + [str(ROOT / "tests/scripts/failing_criterion.py")],
        env=os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT / 'plugins'}:{ROOT / 'tests'}", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    took = time.monotonic() - started
    assert job.returncode != 0
    first = job.stderr.index("Traceback")
    text, _, after = job.stderr[first:].partition("the criterion broke")
    assert text.count("Traceback") == 1, "the first traceback is the one of the rank that raised"
    assert "in action 1F0 (stage, kind, micro-batch)" in after
    assert took < 30, f"the job took {took:.0f} s to end"
