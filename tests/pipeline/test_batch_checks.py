import pytest

from hybridpp.errors import DataError, PeerError
from hybridpp.pipeline.batch_checks import EXHAUSTED, FAILED, READY, RankBatchInfo, check_readiness, different_batches

FULL, EMPTY = RankBatchInfo(READY, num_items=2.0), RankBatchInfo(READY)
ENDED, BROKEN = RankBatchInfo(EXHAUSTED), RankBatchInfo(FAILED)


@pytest.mark.parametrize("infos", [[FULL, FULL], [FULL, EMPTY], [ENDED, ENDED]], ids=str)
def test_ranks_that_all_have_a_batch_or_none(infos):
    check_readiness(infos)


@pytest.mark.parametrize(
    ("infos", "kind", "text"),
    [
        ([FULL, BROKEN, ENDED, BROKEN], PeerError, "reading the batch failed on ranks 1, 3"),
        ([ENDED, FULL], DataError, "the data ended on rank 0 but not on the others"),
        ([EMPTY, EMPTY], DataError, "the criterion counts no items in any replica's batch"),
    ],
    ids=str,
)
def test_what_is_wrong_with_the_ranks_batches(infos, kind, text):
    with pytest.raises(kind, match=f"^{text}"):
        check_readiness(infos)


def test_ranks_with_different_batches_are_named():
    assert str(different_batches((2, 3))).startswith("the ranks of one pipeline must hold the same batch: ranks 2, 3")
