"""A rank that dies is started again, with its job; one that raises ends the job, and its own traceback comes first."""

import time

import pytest
from processes import torchrun
from support import ROOT


# A restart: tests/cli/test_run.py; which error is shown: test_one_message.py; where ranks meet: test_restart.py.
@pytest.mark.matrix
def test_a_job_is_restarted_and_a_rank_that_raises_ends_it_in_30_s():
    job = torchrun(2, ROOT / "tests/scripts/rejoined.py", launcher=["--max-restarts", "1"])
    # Its clock is this one; how long the processes take to start is another matter.
    sums, _, raised = job.stdout.partition("raises at ")
    assert sums == "attempt 0 sum 3.0\nattempt 1 sum 3.0\n"
    took = time.monotonic() - float(raised.split()[0])
    assert job.returncode != 0
    _, marker, last = job.stderr.rpartition("the last attempt goes on")
    assert marker
    first = last.index("Traceback")
    text, _, after = last[first:].partition("the criterion broke")
    assert text.count("Traceback") == 1, "the first traceback is the one of the rank that raised"
    assert "in action 1F0 (stage, kind, micro-batch)" in after
    assert took < 30, f"the job took {took:.0f} s more to end"
