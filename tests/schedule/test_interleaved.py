import re
import warnings
from textwrap import dedent
from types import SimpleNamespace

import pytest
from schedule.oracle import SIZES_WITH_CHUNKS, idle_share

from hybridpp.errors import ScheduleError
from hybridpp.schedule import check_program, interleaved, looped, one_f_one_b, peak_activations, placement, render

# Torch refuses numbers of micro-batches that its groups do not divide.
TORCH_SIZES = [(p, m, v) for p, m, v in SIZES_WITH_CHUNKS if v > 1 and m % max(1, m // p) == 0]


def test_interleaved_with_two_ranks_two_chunks_and_four_microbatches():
    assert render(interleaved(2, 4, 2)) == dedent("""\
        rank 0 | 0F0 0F1 2F0 2F1 0F2 2B0 0F3 2B1 2F2 0B0 2F3 0B1 2B2 2B3 0B2 0B3
        rank 1 | 1F0 1F1 3F0 3B0 3F1 3B1 1F2 1B0 1F3 1B1 3F2 3B2 3F3 3B3 1B2 1B3
    """)


def test_microbatches_that_no_group_divides_form_longer_and_shorter_groups():
    assert render(interleaved(2, 5, 2)) == dedent("""\
        rank 0 | 0F0 0F1 0F2 2F0 2F1 2F2 2B0 0F3 2B1 0F4 2B2 2F3 0B0 2F4 0B1 0B2 2B3 2B4 0B3 0B4
        rank 1 | 1F0 1F1 1F2 3F0 3B0 3F1 3B1 3F2 3B2 1F3 1B0 1F4 1B1 3F3 1B2 3F4 3B3 3B4 1B3 1B4
    """)


@pytest.mark.covering("p m", "p v")
@pytest.mark.parametrize(("p", "m", "v"), SIZES_WITH_CHUNKS)
def test_interleaved_holds_and_idles_as_its_docstring_says(p, m, v):
    programs = interleaved(p, m, v)
    check_program(programs, p * v, m)
    assert placement(programs) == looped(p, v)
    if v == 1:
        assert programs == one_f_one_b(p, m)
    else:
        g = -(-m // max(1, m // p))
        assert peak_activations(programs) == tuple(
            min(m * v, (v - 1) * g + 2 * (p - 1 - rank) + 1) for rank in range(p)
        )
    assert idle_share(programs) == pytest.approx(1 - m * v / (m + p - 1 + (v - 1) * max(m, p)))
    if m >= p:
        assert idle_share(programs) == pytest.approx((p - 1) / (m * v + p - 1))


@pytest.mark.covering("p v")
@pytest.mark.parametrize(("p", "m", "v"), TORCH_SIZES)
def test_the_order_is_torchs_where_torch_has_one(p, m, v):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torch.distributed.pipelining.schedules import ScheduleInterleaved1F1B

    rounds = max(1, m // p)
    settings = SimpleNamespace(n_local_stages=v, microbatches_per_round=m // rounds, pp_group_size=p, _n_microbatches=m)
    for rank, row in enumerate(interleaved(p, m, v)):
        theirs = ScheduleInterleaved1F1B._calculate_single_rank_operations(settings, rank)
        assert list(map(str, row)) == [str(action) for action in theirs if action is not None]


def test_counts_below_one():
    text = "a schedule needs every count to be at least 1: got num_ranks=2, num_microbatches=4, num_chunks=0."
    with pytest.raises(ScheduleError, match=f"^{re.escape(text)}$"):
        interleaved(2, 4, 0)
