import pytest
from torch.distributed import HashStore

from hybridpp.cluster.exit_reports import ExitReports
from hybridpp.errors import CheckpointError, ConfigError


@pytest.fixture(params=["store", "folder"])
def ranks(request, tmp_path):
    """Three ranks of a job that has a store, or of a host before there is one."""
    store = HashStore() if request.param == "store" else None
    return [ExitReports(store, rank, tmp_path) for rank in range(3)]


def test_who_left_and_who_failed_is_told_from_who_said_nothing():
    store = HashStore()
    ranks = [ExitReports(store, rank) for rank in range(3)]
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
    def set(self, *arguments):
        raise RuntimeError("broken pipe")

    check = add = set


def test_a_store_that_is_gone_is_no_error(tmp_path):
    alone = ExitReports(None, 1)
    alone.store = _Gone()
    alone.report_success()
    assert alone.exit_reason(0) == ""
    assert alone.is_first("anything"), "where nobody can be asked, it is better said twice than never"
    # On one host, a folder takes the place of the store.
    ranks = [ExitReports(None, rank, tmp_path) for rank in range(2)]
    for rank in ranks:
        rank.store = _Gone()
    assert [rank.claim_first_error(OSError("full")) for rank in ranks] == [True, False]
    assert ranks[1].first_error(0) == "OSError: full"


def test_one_rank_is_the_first_with_an_error(ranks):
    assert ranks[0].first_error(0) is None
    assert [rank.claim_first_error(ConfigError("pp_size=3")) for rank in (ranks[1], *ranks)] == [True, *3 * [False]]
    assert ranks[2].first_error(0) == "ConfigError: pp_size=3"
    assert [rank.is_first("question") for rank in ranks] == [True, False, False]


@pytest.mark.parametrize(
    ("error", "is_like"),
    [
        (CheckpointError("the disk is full, says rank 1"), True),
        (CheckpointError("saving failed on rank 1: the disk is full, says rank 1. See there."), True),
        (CheckpointError("full"), True),
        (ValueError("another one"), False),
    ],
)
def test_an_error_that_repeats_the_first_is_known(ranks, error, is_like):
    ranks[1].claim_first_error(CheckpointError("the disk is full, says rank 17"))
    assert ranks[0].is_like_first_error(error, 0) is is_like


def test_without_a_first_error_none_is_like_it(ranks):
    assert not ranks[0].is_like_first_error(OSError("x"), 0)


def test_errors_that_differ_in_numbers_are_of_one_kind(ranks):
    errors = [OSError("rank 1 failed"), OSError("rank 2 failed"), OSError("something else")]
    assert [rank.is_first_of_kind(error) for rank, error in zip(ranks, errors, strict=True)] == [True, False, True]
