"""Where ranks wait for others, the first of them tells for whom, and an error says it too."""

import logging
import re
import threading

import pytest

from hybridpp.cluster import missing_ranks
from hybridpp.cluster.missing_ranks import reporting_missing
from hybridpp.errors import PeerError
from hybridpp.nn.torch_private import HashStore

PATIENCE_S = 60.0


class Told(logging.Handler):
    """Collects messages; ``come`` is set at the first."""

    def __init__(self):
        super().__init__()
        self.texts, self.come = [], threading.Event()

    def emit(self, record):
        self.texts.append(record.getMessage())
        self.come.set()


@pytest.fixture
def told(monkeypatch):
    monkeypatch.setattr(missing_ranks, "FIRST_NOTICE_S", 0.01)
    handler = Told()
    missing_ranks.LOGGER.addHandler(handler)
    yield handler
    missing_ranks.LOGGER.removeHandler(handler)


def test_the_first_rank_that_waits_tells_who_is_missing(told):
    store = HashStore()
    store.set("a meeting 3", "")
    with reporting_missing(store, 1, 4, "a meeting", "to begin"):
        assert told.come.wait(PATIENCE_S)
    assert re.fullmatch(r"\[rank 1\] has waited \d+ s for ranks 0, 2 to begin\.", told.texts[0])


def test_others_that_wait_and_ranks_that_miss_nobody_are_silent(told):
    store = HashStore()
    with reporting_missing(store, 0, 3, "a meeting", "to begin"):
        with reporting_missing(store, 1, 3, "a meeting", "to begin"):
            told.come.clear()
            assert told.come.wait(PATIENCE_S)
        with reporting_missing(store, 2, 3, "a meeting", "to begin"):
            pass
    assert {text.partition(" has")[0] for text in told.texts} == {"[rank 0]"}


@pytest.mark.parametrize(("present", "notes"), [(1, ["hybridpp: rank 0 waited for rank 1 to begin."]), (2, [])])
def test_an_error_says_who_was_missing(present, notes):
    store = HashStore()
    for rank in range(present):
        store.set(f"a meeting {rank}", "")
    with pytest.raises(PeerError) as raised, reporting_missing(store, 0, 2, "a meeting", "to begin"):
        raise PeerError("rank 1 sent nothing")
    assert getattr(raised.value, "__notes__", []) == notes
