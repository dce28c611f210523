import re
from dataclasses import replace

import pytest
import torch

from hybridpp.cluster import Loopback, current_world
from hybridpp.errors import DataError, RefusedByPeerError, UnlikeCallsError
from hybridpp.pipeline import LossForm, Measured, RankBatchInfo, read_batch, split_batch, start_batch_check, step_call
from hybridpp.pipeline.loss_items import MAX_COUNTS, num_rows

PIPELINES = ((0, 1), (2, 3))


def batch_of(*leaves, count=2):
    return lambda: split_batch(leaves, num_microbatches=count, microbatch_size=None)


def out_of_data():
    return read_batch(iter([]))


def broken():
    raise OSError("the disk is gone")


def nothing_counts():
    return split_batch([torch.zeros(2)], num_microbatches=1, microbatch_size=None, num_items=lambda inputs: 0)


def outcomes(prepares, training=(True, True, True, True)):
    """What the check of the batches gives or raises, by rank; every rank comes to an end."""

    def run():
        world = current_world()
        call = f"in {step_call('Net', training[world.rank])}"
        try:
            return start_batch_check(world.control(), PIPELINES, call, prepares[world.rank]).wait()
        except (UnlikeCallsError, DataError, RefusedByPeerError, OSError, StopIteration) as error:
            return error

    return Loopback(4).run(run)


def assert_all_raise(results, kind, text):
    for result in results:
        assert type(result) is kind
        assert str(result) == text


def test_ranks_learn_what_the_others_hold():
    small, large = batch_of(torch.ones(2)), batch_of(torch.ones(6), count=3)
    for rank, (batch, reports) in enumerate(outcomes([small, small, large, large])):
        assert [microbatch.num_samples for microbatch in batch.microbatches] == ([1, 1] if rank < 2 else [2, 2, 2])
        assert [report.num_items for report in reports] == [2, 2, 6, 6]
        assert [report.num_microbatches for report in reports] == [2, 2, 3, 3]
        assert reports[0] == RankBatchInfo(0.0, 2.0, 2.0, reports[1].digest)
        assert reports[2].digest == reports[3].digest != reports[0].digest


def test_the_message_of_a_batch_has_room_for_all_counts():
    counts = tuple(float(index) for index in range(MAX_COUNTS))

    def counted():
        batch = batch_of(torch.ones(2), count=1)()
        (part,) = batch.microbatches
        form = LossForm(counts=(num_rows(),) * MAX_COUNTS, products=())
        return replace(batch, form=form, microbatches=[replace(part, counts=Measured(counts, counts))])

    for _, reports in outcomes([counted] * 4):
        assert [report.counts for report in reports] == [counts] * 4


def test_when_all_are_out_of_data_iteration_stops():
    assert [type(result) for result in outcomes([out_of_data] * 4)] == [StopIteration] * 4


@pytest.mark.parametrize(("ended", "named"), [([1], "rank 1"), ([0, 2, 3], "ranks 0, 2, 3")])
def test_data_that_ends_on_some_ranks(ended, named):
    prepares = [out_of_data if rank in ended else batch_of(torch.ones(2)) for rank in range(4)]
    text = (
        f"the data ended on {named} but not on the others. Give every rank an iterator of the same length: use "
        "plugin.prepare_dataloader, and take len(dataloader) steps."
    )
    assert_all_raise(outcomes(prepares), DataError, text)


@pytest.mark.parametrize("others", [batch_of(torch.ones(2)), out_of_data])
def test_a_rank_that_cannot_read_says_why_and_the_others_who(others):
    own, *rest = outcomes([broken, others, others, broken])
    assert_all_raise([own, rest.pop()], OSError, "the disk is gone")
    assert_all_raise(rest, RefusedByPeerError, "reading the batch failed on ranks 0, 3. See the error printed there.")


BIG = torch.zeros(100, 1000)


@pytest.mark.parametrize(
    ("mine", "theirs"),
    [
        ((torch.ones(2),), (torch.tensor([1.0, 2.0]),)),
        ((torch.ones(2),), (torch.ones(4),)),
        ((torch.ones(4, 1),), (torch.ones(4),)),
        ((torch.ones(2),), (torch.ones(2, dtype=torch.int64),)),
        ((torch.zeros(2, dtype=torch.float16),), (torch.zeros(2, dtype=torch.bfloat16),)),
        ((torch.zeros(2), "a"), (torch.zeros(2), "b")),
        ((torch.zeros(2), ["a", "b"]), (torch.zeros(2), ["a", "c"])),
        ((torch.zeros(2), torch.tensor(1)), (torch.zeros(2), torch.tensor(2))),
        ((BIG,), (BIG + torch.rand(100, 1),)),
        ((BIG,), (BIG + torch.rand(1000),)),
    ],
)
def test_ranks_of_one_pipeline_must_hold_the_same(mine, theirs):
    same = [batch_of(*mine)] * 2
    text = (
        "the ranks of one pipeline must hold the same batch: ranks 2, 3 hold different ones. "
        "Use plugin.prepare_dataloader, or seed the sampler and the transforms alike on all of them."
    )
    assert_all_raise(outcomes([*same, batch_of(*mine), batch_of(*theirs)]), DataError, text)


@pytest.mark.parametrize(
    "leaf",
    [
        torch.rand(4).bfloat16(),
        torch.rand(4) > 0.5,
        torch.rand(4, 3).t().reshape(4, 3)[:, ::2],
        torch.randint(9, (4,)).to(torch.uint8),
        torch.rand(4, 0),
        torch.rand(4, dtype=torch.complex64),
        torch.rand(4).requires_grad_(),
    ],
    ids=lambda leaf: str(leaf.dtype),
)
def test_batches_of_every_kind_are_compared(leaf):
    results = outcomes([batch_of(leaf)] * 2 + [batch_of(leaf.clone())] * 2)
    assert len({report.digest for _, reports in results for report in reports}) == 1


class OnDevice(torch.Tensor):
    """A tensor that is not in host memory, as far as anyone can tell; notes how often it is fetched."""

    fetches = 0
    is_cpu = False

    def cpu(self):
        OnDevice.fetches += 1
        return self.as_subclass(torch.Tensor)


def test_a_batch_on_a_device_is_fetched_at_once(monkeypatch):
    monkeypatch.setattr(OnDevice, "fetches", 0)
    leaves = torch.rand(4, 5000), torch.rand(4), torch.tensor(3)
    away = [leaf.as_subclass(OnDevice) for leaf in leaves[:2]]
    results = outcomes([batch_of(*leaves)] * 2 + [batch_of(*away, leaves[2])] * 2)
    assert len({report.digest for _, reports in results for report in reports}) == 1
    assert OnDevice.fetches == 2, "once on each of two ranks"


def test_a_batch_that_no_other_rank_must_hold_is_not_looked_at():
    """Meta tensors have nothing to look at."""

    def run():
        world = current_world()
        return start_batch_check(world.control(), ((0,), (1,)), "", batch_of(torch.ones(4, device="meta"))).wait()

    for batch, reports in Loopback(2).run(run):
        assert batch.num_items == 4
        assert [report.digest for report in reports] == [0, 0]


def test_some_ranks_train_and_some_do_not():
    text = (
        "all ranks must make the same calls in the same order: "
        "ranks 0, 3 are in an evaluation of Net (execute_pipeline, gradients disabled) while "
        "ranks 1, 2 are in a training step of Net (execute_pipeline, gradients enabled). "
        "Make these calls on all ranks, with gradients enabled on all or on none: put no `if coordinator.is_master()` "
        "around them, and read the same data iterators in the same way everywhere."
    )
    results = outcomes([batch_of(torch.ones(2))] * 4, training=(False, True, True, False))
    assert_all_raise(results, UnlikeCallsError, text)


def test_a_mean_over_nothing():
    text = (
        "the criterion counts no items in any replica's batch, so its mean is not defined. "
        "Check criterion.num_items and the labels."
    )
    assert_all_raise(outcomes([nothing_counts] * 4), DataError, text)
    results = outcomes([nothing_counts] * 2 + [batch_of(torch.ones(3))] * 2)
    assert [batch.num_items for batch, _ in results] == [0, 0, 3, 3]


@pytest.mark.parametrize("data", [[torch.ones(2)], {"x": 1}, torch.ones(2)])
def test_only_iterators_are_read(data):
    text = f"execute_pipeline takes an iterator: got {type(data).__name__}. Pass iter(dataloader)."
    with pytest.raises(DataError, match=f"^{re.escape(text)}$"):
        read_batch(data)
