"""The training loop that people bring along works with this library's imports."""

from processes import run_script
from support import ROOT


def test_the_tutorials_loop_learns_on_two_stages_and_two_replicas():
    job = run_script(4, ROOT / "tests/scripts/tutorial.py")
    assert job.returncode == 0, job.stderr
    losses = [float(line) for line in job.stdout.split()]
    assert len(losses) == 12
    assert sum(losses[-4:]) < 0.9 * sum(losses[:4])
    assert "Epoch [6]: 100%" in job.stderr
    assert "Warning" not in job.stderr
