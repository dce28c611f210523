"""What a rank notes of its own progress."""

import time

from hybridpp.cluster import progress as progress_module
from hybridpp.cluster.progress import Awaited, Progress


def test_the_innermost_section_counts_and_every_change_is_counted():
    progress = Progress()
    with progress.inside("step", lambda: "step 1"):
        with progress.inside("data", lambda: "a batch"):
            assert (progress.section, progress.location()) == ("data", "a batch")
        assert (progress.section, progress.location()) == ("step", "step 1")
    assert (progress.section, progress.location(), progress.num_changes) == ("script", "", 4)


def test_a_wait_is_there_while_it_lasts():
    progress = Progress()
    progress.begin_wait(lambda: Awaited("a message", (1,), "pp"))
    assert progress.awaited is not None
    assert progress.awaited().ranks == (1,)
    progress.end_wait()
    assert progress.awaited is None


def test_a_wait_does_not_end_in_a_rank_that_is_ended(monkeypatch):
    slept = []
    monkeypatch.setattr(time, "sleep", slept.append)
    progress = Progress()
    progress.is_ending = True
    progress.end_wait()
    assert slept == [progress_module._ENDING_S]
