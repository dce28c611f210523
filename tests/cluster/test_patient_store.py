import threading

import pytest
from torch.distributed import HashStore

from hybridpp.cluster.exit_reports import ExitReports
from hybridpp.cluster.missing_ranks import reporting_missing
from hybridpp.cluster.patient_store import ask
from hybridpp.errors import PeerError


class Silent(HashStore):
    """A store of a host that is cut off: it never answers."""

    def set(self, *arguments):
        threading.Event().wait()

    check = add = get = set


@pytest.fixture
def impatient(monkeypatch):
    monkeypatch.setattr("hybridpp.cluster.patient_store.PATIENCE_S", 0.05)


def test_answers_and_errors_are_those_of_the_call():
    assert ask(lambda: 3) == 3
    with pytest.raises(KeyError, match="no such key"):
        ask(lambda: {}["no such key"])


def test_no_answer_is_an_error():
    with pytest.raises(RuntimeError, match=r"the job's store has not answered for 0\.05 s"):
        ask(threading.Event().wait, patience_s=0.05)


def test_a_rank_whose_store_is_cut_off_ends_all_the_same(impatient):
    reports = ExitReports(None, 1)
    for question in (
        lambda: reports.report_error(OSError("cut")),
        lambda: reports.claim_first_error(OSError("cut")),
        lambda: reports.exit_reason(0),
    ):
        reports.store = Silent()
        question()
        assert reports.store is None, "it is asked once"


def test_ranks_that_meet_over_a_cut_link_are_told_so_by_their_messages(impatient):
    with pytest.raises(PeerError) as raised, reporting_missing(Silent(), 0, 2, "meeting", "to meet"):
        raise PeerError("rank 1 sent nothing")
    assert not hasattr(raised.value, "__notes__")
