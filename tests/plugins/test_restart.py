"""A job that is started again (by torchrun: test_failure.py): its ranks meet anew, whatever the store still has."""

import re
from datetime import timedelta

import pytest
from processes import run_script
from support import ROOT
from torch.distributed import TCPStore

SCRIPT = ROOT / "tests/scripts/restarted.py"


def losses(stdout):
    return re.findall(r"attempt (\d) loss (\S+)", stdout)


@pytest.fixture
def agent(monkeypatch):
    """A store that outlives the attempts, as that of torchrun's agent."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60))
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    monkeypatch.setenv("AGENT_PORT", str(store.port))
    return store


def test_every_attempt_finds_its_ranks_wherever_one_died_before(agent, monkeypatch):
    whole = []
    for attempt, dies in enumerate(["launched", "plugin", "boosted", "step", "never"]):
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", str(attempt))
        job = run_script(2, SCRIPT, dies)
        assert (job.returncode == 0) == (dies == "never"), job.stderr
        whole.append(losses(job.stdout))
    assert whole[3] == [("3", whole[4][0][1])], "the first step came before the death"
    assert len(whole[4]) == 3
