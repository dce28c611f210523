import json
import os
import re
import sys

import pytest
import torch.distributed as dist
from torch.distributed import HashStore

from hybridpp.cluster import failure_hook
from hybridpp.cluster.exit_reports import ExitReports
from hybridpp.cluster.failure_hook import FailureHook, FailureOptions, Telling, is_of_peer
from hybridpp.cluster.launcher_notes import LauncherNotes, num_ended
from hybridpp.cluster.progress import Progress
from hybridpp.cluster.stop_request import StopRequest
from hybridpp.errors import ConfigError, DataError, PeerError, PeerTimeoutError


@pytest.fixture(autouse=True)
def plain(monkeypatch):
    """The interpreter's own hook, and no patience."""
    monkeypatch.setattr(failure_hook, "_LINGER_S", 0.05)
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)


def hooks(number=3, **options):
    """The hooks of ranks that share a store."""
    store = HashStore()
    return [FailureHook(ExitReports(store, rank), number, FailureOptions(**options)) for rank in range(number)]


def ended(hook, error):
    """End a rank with an error that was raised."""
    try:
        raise error
    except BaseException as raised:
        hook(type(raised), raised, raised.__traceback__)


def printed(capsys, *failures):
    """What each rank prints, in the order of their ends."""
    texts = []
    for hook, error in failures:
        ended(hook, error)
        texts.append(capsys.readouterr().err)
    return texts


def test_one_mistake_of_all_ranks_is_one_message(capsys):
    first, *others = printed(capsys, *((hook, ConfigError("pp_size=3 of 8 ranks")) for hook in hooks(8)))
    assert first.startswith("hybridpp: rank 0 of 8 failed.\n")
    assert first.endswith("ConfigError: pp_size=3 of 8 ranks\n")
    assert others == 7 * [""]


@pytest.mark.parametrize(
    "lost",
    [
        PeerError("rank 1 is gone"),
        PeerTimeoutError("rank 1 sent nothing"),
        dist.DistNetworkError("reset"),
        RuntimeError("[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:533] Connection closed by peer"),
        RuntimeError("Application timeout caused pair closure"),
    ],
)
def test_ranks_that_fail_because_another_did_print_nothing(capsys, lost):
    ranks = hooks()
    texts = printed(capsys, (ranks[1], ValueError("the model is wrong")), (ranks[0], lost), (ranks[2], lost))
    assert "ValueError: the model is wrong" in texts[0]
    assert texts[1:] == ["", ""]


def test_a_rank_that_was_killed_is_named_by_one_of_the_others(capsys):
    ranks = hooks()
    texts = printed(capsys, *((hook, PeerError("rank 1\nis gone.")) for hook in (ranks[2], ranks[0])))
    assert texts == ["hybridpp: rank 2 of 3 ends: PeerError: rank 1 is gone.\n", ""]


def test_the_reason_is_printed_after_the_line_of_a_rank_that_ended_first(capsys):
    ranks = hooks()
    line, reason = printed(capsys, (ranks[2], PeerError("rank 1 is gone")), (ranks[1], OSError("disk full")))
    assert line == "hybridpp: rank 2 of 3 ends: PeerError: rank 1 is gone\n"
    assert "OSError: disk full" in reason


def test_other_errors_are_a_line_for_each_kind(capsys):
    errors = [DataError("bad"), OSError("row 1"), OSError("row 2"), KeyError("name")]
    first, *others = printed(capsys, *zip(hooks(4), errors, strict=True))
    assert "DataError: bad" in first
    lines = ["OSError: row 1\n", "", "KeyError: 'name'\n"]
    assert others == [line and f"hybridpp: rank {rank} of 4 ends: {line}" for rank, line in enumerate(lines, 1)]


def test_an_interruption_from_the_keyboard_is_printed_once(capsys):
    first, *others = printed(capsys, *((hook, KeyboardInterrupt()) for hook in hooks()))
    assert re.fullmatch(r"hybridpp: rank 0 of 3 was interrupted \(Ctrl-C\), at .*\n", first)
    assert others == ["", ""]


def test_a_hook_of_the_script_gets_what_the_first_rank_prints(capsys, monkeypatch):
    seen = []
    monkeypatch.setattr(sys, "excepthook", lambda kind, error, trace: seen.append(error))
    errors = [ConfigError("a"), ConfigError("a")]
    printed(capsys, *zip(hooks(2), errors, strict=True))
    assert seen == errors[:1]


def test_all_frames_are_shown_on_demand(capsys):
    (text,) = printed(capsys, (hooks(1, full_traceback=True)[0], ConfigError("a")))
    assert text.startswith("Traceback (most recent call last):")


def test_torchrun_learns_which_error_was_the_first(capsys, tmp_path):
    file = tmp_path / "error.json"
    (hook,) = hooks(1, error_file=file)
    printed(capsys, (hook, ConfigError("a")))
    message = json.loads(file.read_text())["message"]
    assert message["message"] == "ConfigError: a (rank 0 has printed it)"
    # What torch's own `record` has written stays.
    file.write_text("{}")
    printed(capsys, (hook, ConfigError("b")))
    assert file.read_text() == "{}"


def test_a_rank_that_has_failed_catches_no_signals(capsys):
    (hook,) = hooks(1)
    released = []

    class Stop(StopRequest):
        def ignore(self):
            released.append(True)

    hook.joined(hook.reports, Stop(), Progress())
    try:
        printed(capsys, (hook, ConfigError("a")))
    finally:
        hook.remove()
    assert released == [True]


def test_what_was_decided_while_there_was_a_store_holds(capsys):
    ranks = hooks(2)
    error, later = ConfigError("a"), ConfigError("a")
    assert [ranks[0].decide(error), ranks[1].decide(later)] == [Telling.ALL, Telling.NOTHING]
    for hook in ranks:  # as destroy() does in a `finally`
        hook.reports.store = HashStore()
    texts = printed(capsys, (ranks[0], error), (ranks[1], later))
    assert "ConfigError: a" in texts[0]
    assert texts[1] == ""


def test_a_hook_takes_the_place_of_that_of_an_earlier_launch():
    before = sys.excepthook
    first, second = hooks(2)
    first.install()
    hook = FailureHook(second.reports, 2, FailureOptions())
    hook.install()
    assert sys.excepthook is hook
    hook.remove()
    assert sys.excepthook is before


def test_a_rank_that_has_failed_is_not_one_that_ended_well(capsys, tmp_path):
    """Else a job that lost its steps would end with 0 after a signal."""
    for error in (None, ConfigError("a")):
        (hook,) = hooks(1)
        hook._stop = StopRequest((), LauncherNotes(tmp_path, local_rank=0))
        if error is not None:
            printed(capsys, (hook, error))
        hook._report_success()
        assert num_ended(tmp_path) == (error is None)
        LauncherNotes(tmp_path).clear()


def test_a_forked_child_is_not_a_rank(capsys, monkeypatch):
    (hook,) = hooks(1)
    own = os.getpid()
    monkeypatch.setattr(os, "getpid", lambda: own + 1)
    (text,) = printed(capsys, (hook, ConfigError("a")))
    assert text.startswith("Traceback")
    assert hook.reports.first_error(0) is None
    hook._report_success()
    assert hook.reports.exit_reason(0) == ""
    monkeypatch.setattr(os, "getpid", lambda: own)
    hook._report_success()
    assert hook.reports.exit_reason(0) != ""


@pytest.mark.parametrize("error", [ConfigError("x"), OSError("x"), RuntimeError("x"), KeyboardInterrupt()])
def test_an_error_of_ones_own_is_not_a_peers(error):
    assert not is_of_peer(error)
