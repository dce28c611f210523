"""A rank that raises takes the whole job down, and its own traceback comes first."""

import time

from processes import torchrun
from support import ROOT


def test_a_rank_that_raises_ends_the_job_in_30_s_with_its_traceback_first():
    job = torchrun(2, ROOT / "tests/scripts/failing_criterion.py")
    # Its clock is this one; how long four processes take to start is another matter.
    took = time.monotonic() - float(job.stdout.split("raises at ")[1].split()[0])
    assert job.returncode != 0
    first = job.stderr.index("Traceback")
    text, _, after = job.stderr[first:].partition("the criterion broke")
    assert text.count("Traceback") == 1, "the first traceback is the one of the rank that raised"
    assert "in action 1F0 (stage, kind, micro-batch)" in after
    assert took < 30, f"the job took {took:.0f} s more to end"
