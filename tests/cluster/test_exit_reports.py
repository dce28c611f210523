import os
import sys

import pytest
from torch.distributed import HashStore

from hybridpp.cluster import exit_reports
from hybridpp.cluster.exit_reports import ExitReports, report_exit
from hybridpp.errors import ConfigError, DataError, PeerError


@pytest.fixture(autouse=True)
def no_patience(monkeypatch):
    monkeypatch.setattr(exit_reports, "_PATIENCE_S", 0.1)


@pytest.fixture
def ranks():
    store = HashStore()
    return [ExitReports(store, rank) for rank in range(3)]


def test_who_left_and_who_failed_is_told_from_who_said_nothing(ranks):
    ranks[0].report_error(ConfigError("pp_size=3"))
    ranks[1].report_success()
    # A process that ends after its error does not leave in peace, nor the other way round.
    ranks[0].report_success(), ranks[1].report_error(OSError("late"))
    assert ranks[2].exit_reason(0) == "It ended with ConfigError: pp_size=3"
    assert ranks[2].exit_reason(1) == (
        "Rank 1 left the job without an error: its script ended, or it called destroy(). What rank 2 is in must be "
        "called on every rank: put no `if coordinator.is_master()` around booster.save_model and the like, which write "
        "on rank 0 alone by themselves."
    )
    assert ranks[0].exit_reason(2) == ""


class _Gone(HashStore):
    def set(self, key, value):
        raise RuntimeError("broken pipe")

    check = set


def test_a_store_that_is_gone_is_no_error():
    alone = ExitReports(_Gone(), 1)
    alone.report_success()
    assert alone.exit_reason(0) == ""


def ended(exit_reports, error, monkeypatch):
    """What a process that ends with ``error`` prints: by its own hook, and beyond."""
    printed = []
    monkeypatch.setattr(sys, "excepthook", lambda kind, error, trace: printed.append(str(error)))
    stop = report_exit(exit_reports)
    sys.excepthook(type(error), error, None)
    stop()
    assert sys.excepthook.__module__ == __name__
    return printed


def test_an_error_of_all_ranks_is_printed_by_the_first(ranks, monkeypatch, capsys):
    assert [ended(rank, ConfigError("pp_size=3"), monkeypatch) for rank in ranks] == [["pp_size=3"], [], []]
    assert capsys.readouterr().err == (
        "[rank 1] ConfigError, as on rank 0, which prints it.\n[rank 2] ConfigError, as on rank 0, which prints it.\n"
    )


@pytest.mark.parametrize("error", [ConfigError("pp_size=5"), DataError("pp_size=3"), PeerError("x"), OSError("x")])
def test_an_error_of_its_own_is_printed_by_every_rank(ranks, monkeypatch, capsys, error):
    ended(ranks[0], ConfigError("pp_size=3"), monkeypatch)
    assert ended(ranks[1], error, monkeypatch) == [str(error)]
    assert capsys.readouterr().err == ""


def test_an_error_that_rank_0_does_not_have_is_printed_after_a_moment(ranks, monkeypatch):
    assert ended(ranks[1], ConfigError("pp_size=3"), monkeypatch) == ["pp_size=3"]
    assert ranks[0].exit_reason(1) == "It ended with ConfigError: pp_size=3"


def test_a_forked_child_does_not_leave_for_its_rank(ranks, monkeypatch):
    registered = []
    monkeypatch.setattr(exit_reports.atexit, "register", registered.append)
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    report_exit(ranks[1])
    own = os.getpid()
    monkeypatch.setattr(os, "getpid", lambda: own + 1)
    registered[0]()
    assert ranks[0].exit_reason(1) == ""
    monkeypatch.setattr(os, "getpid", lambda: own)
    registered[0]()
    assert ranks[0].exit_reason(1) != ""
