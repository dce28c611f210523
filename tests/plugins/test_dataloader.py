"""Who sees which samples."""

import multiprocessing
import random
import re
import threading
from itertools import chain

import numpy
import pytest
import torch
from hybridpp_plugins import dataloader
from support import IMAGE, boosted, model_loss, sgd, tiny_vit
from torch import nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset, TensorDataset

from hybridpp import Booster, HybridParallelPlugin
from hybridpp.cluster import Loopback, current_world
from hybridpp.cluster.stop_request import StopRequest
from hybridpp.errors import ConfigError, DataError


def plugin(pp_size=1):
    return HybridParallelPlugin(tp_size=1, pp_size=pp_size, num_microbatches=2, precision="fp32")


def epochs(num_ranks, num_samples, count=1, pp_size=1, **options):
    """By rank: per epoch, the batches of sample numbers."""

    def run():
        dataset = TensorDataset(torch.arange(num_samples))
        loader = plugin(pp_size).prepare_dataloader(dataset, **options)
        return [[batch[0].tolist() for batch in loader] for _ in range(count)]

    return Loopback(num_ranks).run(run)


def test_replicas_see_disjoint_samples_and_ranks_of_one_replica_the_same():
    ranks = epochs(4, 22, pp_size=2, batch_size=4, shuffle=True)
    assert ranks[0] == ranks[1]
    assert ranks[2] == ranks[3]
    first, second = (list(chain.from_iterable(rank[0])) for rank in (ranks[0], ranks[2]))
    assert sorted(first + second) == list(range(22))


@pytest.mark.parametrize("seed_samples", [None, False])
def test_rows_of_a_table_train_as_its_tensors_do(seed_samples):
    rows = [{"x": [float(index), 1.0, -1.0], "labels": index % 2} for index in range(4)]
    torch.manual_seed(0)
    start = nn.Linear(3, 2)
    x, labels = torch.tensor([row["x"] for row in rows]), torch.tensor([row["labels"] for row in rows])
    expected = nn.functional.cross_entropy(start(x), labels).item()
    booster = Booster(plugin=plugin(), device="cpu")
    loader = booster.plugin.prepare_dataloader(rows, 4, seed_samples=seed_samples)
    start.forward = lambda x, forward=start.forward: forward(x)
    model, optimizer, criterion, loader, _ = booster.boost(
        start, sgd(start.parameters()), nn.CrossEntropyLoss(), loader
    )
    loss = booster.execute_pipeline(iter(loader), model, criterion, optimizer)["loss"]
    assert loss.item() == pytest.approx(expected, abs=1e-6)


def test_every_epoch_is_shuffled_anew_by_the_seed():
    (once,) = epochs(1, 20, count=3, batch_size=5, shuffle=True, seed=7)
    (again,) = epochs(1, 20, count=3, batch_size=5, shuffle=True, seed=7)
    (other,) = epochs(1, 20, count=1, batch_size=5, shuffle=True, seed=8)
    assert once == again
    assert len({str(epoch) for epoch in once}) == 3
    assert other[0] != once[0]


def test_two_replicas_step_through_the_batches_of_one():
    (one,) = epochs(1, 24, batch_size=8, shuffle=True)
    two = epochs(2, 24, batch_size=4, shuffle=True)
    assert one[0] == [left + right for left, right in zip(two[0][0], two[1][0], strict=True)]


def test_drop_last_collate_and_workers():
    def run():
        loader = plugin().prepare_dataloader(
            TensorDataset(torch.arange(10)),
            batch_size=4,
            drop_last=True,
            collate_fn=lambda samples: [int(value) for (value,) in samples],
            num_workers=1,
            multiprocessing_context="fork",
        )
        return list(loader)

    assert Loopback(1).run(run) == [[[0, 1, 2, 3], [4, 5, 6, 7]]]


def test_wrong_sizes():
    with pytest.raises(ConfigError, match="batch_size"):
        plugin().prepare_dataloader(TensorDataset(torch.arange(4)), batch_size=0)
    with pytest.raises(DataError, match="at least 1 sample"):
        plugin().prepare_dataloader(TensorDataset(torch.arange(0)), batch_size=1)


class Noisy(Dataset):
    """Draws from every generator that a transform might use, and remembers what was asked for."""

    def __init__(self):
        self.asked = []

    def __len__(self):
        return 6

    def __getitem__(self, index):
        self.asked.append(index)
        noise = torch.rand(3, IMAGE, IMAGE) + random.random() + numpy.random.rand()
        return {"pixel_values": noise.float(), "labels": index % 5}


def test_the_sample_taken_at_boost_moves_no_generator_and_no_sampler():
    def run():
        dataset = Noisy()
        hybrid = plugin(pp_size=2)
        loader = hybrid.prepare_dataloader(dataset, batch_size=3, shuffle=True)
        model = tiny_vit()
        before = (random.getstate(), numpy.random.get_state()[2], torch.get_rng_state())
        Booster(plugin=hybrid, device="cpu").boost(model, sgd(model.parameters()), dataloader=loader)
        after = (random.getstate(), numpy.random.get_state()[2], torch.get_rng_state())
        assert before[0] == after[0]
        assert before[1] == after[1]
        assert torch.equal(before[2], after[2])
        assert loader.batch_sampler.epoch == 0
        return len(dataset.asked)

    assert Loopback(2).run(run) == [2, 2]


def test_every_rank_takes_equally_many_steps_per_epoch_on_uneven_replicas():
    def run():
        hybrid = plugin()
        dataset = [{"pixel_values": torch.full((3, IMAGE, IMAGE), float(i)), "labels": i % 5} for i in range(7)]
        loader = hybrid.prepare_dataloader(dataset, batch_size=2, shuffle=True)
        booster, model, optimizer = boosted(tiny_vit(), sgd, None, num_microbatches=2)
        steps = 0
        for _ in range(2):
            data = iter(loader)
            for _ in range(len(loader)):
                booster.execute_pipeline(data, model, model_loss, optimizer)
                optimizer.step()
                steps += 1
        return steps, {name: p.detach() for name, p in model.named_parameters()}

    (steps, first), (other_steps, second) = Loopback(2).run(run)
    assert steps == other_steps == 4
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert current_world().size == 1


def same_batch_warnings(caplog, pp_size=1, num_ranks=2, evaluate=False, loader_of=None):
    """What is said in three steps over a dataloader that ``loader_of(plugin, dataset)`` makes."""

    def run():
        hybrid = plugin(pp_size)
        dataset = [{"pixel_values": torch.full((3, IMAGE, IMAGE), float(i)), "labels": i % 5} for i in range(12)]
        booster = Booster(plugin=hybrid, device="cpu")
        model = tiny_vit(num_layers=2)
        loader = loader_of(hybrid, dataset)
        parts = booster.boost(model, sgd(model.parameters()), dataloader=loader)
        data = iter(loader)
        for _ in range(3):
            with torch.set_grad_enabled(not evaluate):
                booster.execute_pipeline(data, parts.model, model_loss, None if evaluate else parts.optimizer)

    caplog.clear()
    Loopback(num_ranks).run(run)
    return [record.getMessage() for record in caplog.records]


def own_loader(hybrid, dataset):
    return DataLoader(dataset, batch_size=4)


@pytest.mark.parametrize(("pp_size", "num_ranks"), [(1, 2), (2, 4)])
def test_replicas_that_train_on_the_same_batches_are_told_once(caplog, pp_size, num_ranks):
    (text,) = same_batch_warnings(caplog, pp_size, num_ranks, loader_of=own_loader)
    assert "replicas 0, 1 of 2 train on the same batch, so all but one of them are redundant. Use plugin." in text


def test_equal_evaluation_batches_and_distinct_training_batches_are_quiet(caplog):
    def sharded(hybrid, dataset):
        sampler = DistributedSampler(dataset, num_replicas=hybrid.dp_size, rank=hybrid.layout.here.dp)
        return DataLoader(dataset, batch_size=2, sampler=sampler)

    def prepared(hybrid, dataset):
        return hybrid.prepare_dataloader(dataset, batch_size=2)

    assert same_batch_warnings(caplog, evaluate=True, loader_of=own_loader) == []
    assert same_batch_warnings(caplog, loader_of=sharded) == []
    assert same_batch_warnings(caplog, loader_of=prepared) == []
    assert same_batch_warnings(caplog, num_ranks=1, loader_of=own_loader) == []


class Stream(IterableDataset):
    def __iter__(self):
        return iter(torch.arange(7))


def test_a_stream_is_split_over_replicas_and_ends_on_all_ranks_together():
    def run():
        loader = plugin(pp_size=2).prepare_dataloader(Stream(), batch_size=2)
        return [[batch.tolist() for batch in loader] for _ in range(2)]

    ranks = Loopback(4).run(run)
    assert ranks[0] == ranks[1] == [[[0, 1], [4, 5]]] * 2
    assert ranks[2] == ranks[3] == [[[2, 3], [6]]] * 2


class Bare:
    def __getitem__(self, index):
        return index


@pytest.mark.parametrize(
    ("dataset", "options", "error", "text"),
    [
        (
            Bare(),
            {},
            DataError,
            "a dataset needs __getitem__ and __len__, or must be a torch.utils.data.IterableDataset: got",
        ),
        (iter([1]), {}, DataError, "got list_iterator. Add these methods."),
        (
            Stream(),
            {"shuffle": True},
            ConfigError,
            "Stream is iterable, so it sets the order of its samples: got shuffle=True.",
        ),
        (
            Stream(),
            {"num_workers": 2},
            ConfigError,
            "each worker would read all samples of Stream: got num_workers=2. Use 0 or",
        ),
        (Stream(), {"seed_samples": True}, ConfigError, "samples of Stream have no indices to seed generators with"),
        (Stream(), {"batch_size": 0}, ConfigError, "batch_size must be at least 1: got batch_size=0."),
        (
            [1],
            {"sampler": [0]},
            ConfigError,
            "prepare_dataloader selects each replica's samples itself: got sampler.",
        ),
        ([1], {"batch_sampler": [[0]], "batch_size": None}, ConfigError, "itself: got batch_sampler. Leave it out, or"),
        ([1], {"batch_size": None}, ConfigError, "needs batch_size: the samples per replica and step."),
        ([1], {"generator": torch.Generator()}, ConfigError, "selects each replica's samples itself: got generator."),
        ([1], {"seed_samples": 1}, ConfigError, "seed_samples must be True or False: got seed_samples=1."),
        ([], {}, DataError, "dataset must hold at least 1 sample: got num_samples=0."),
        (
            [1, 2, 3],
            {"drop_last": True, "batch_size": 4},
            DataError,
            "drop_last needs at least one complete global batch",
        ),
    ],
)
def test_a_dataset_that_cannot_be_shared_out_is_refused_with_the_way_out(dataset, options, error, text):
    with pytest.raises(error, match=re.escape(text)):
        plugin().prepare_dataloader(dataset, **{"batch_size": 1, **options})


class Drawing(Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, index):
        return index, random.random()


@pytest.mark.parametrize("seed_samples", [True, False])
def test_random_augmentation_depends_on_the_sample_alone_by_default(seed_samples):
    def drawn(num_replicas, num_workers=0):
        def run():
            options = {"batch_size": 8 // num_replicas, "num_workers": num_workers, "seed_samples": seed_samples}
            context = {"multiprocessing_context": "fork"} if num_workers else {}
            loader = plugin().prepare_dataloader(Drawing(), collate_fn=list, **options, **context)
            return dict(sample for batch in loader for sample in batch)

        return {index: number for rank in Loopback(num_replicas).run(run) for index, number in rank.items()}

    one = drawn(1, num_workers=1)
    assert (drawn(2, num_workers=1) == one) == seed_samples
    assert (drawn(2) == one) == seed_samples


@pytest.mark.parametrize(
    ("device", "given", "pins"),
    [("cuda", None, True), ("cuda", False, False), ("cpu", None, False), ("cpu", True, True)],
)
def test_batches_are_page_locked_where_a_device_reads_them(device, given, pins, monkeypatch):
    one = plugin()
    monkeypatch.setattr(type(one.layout.world), "device", property(lambda self: torch.device(device)))
    assert one.prepare_dataloader([0, 1], batch_size=1, pin_memory=given).pin_memory is pins


class Stuck(Drawing):
    def __getitem__(self, index):
        if index == 2:
            threading.Event().wait()
        return index


def test_a_worker_that_is_stuck_does_not_keep_its_rank_from_ending(monkeypatch):
    """Although it leaves the signal by which Python ends it to its rank."""
    world, kept = current_world(), []
    monkeypatch.setattr(world, "stop", StopRequest(["SIGTERM"]))
    monkeypatch.setattr(dataloader, "current_world", lambda: world)

    def rank():
        loader = plugin().prepare_dataloader(Stuck(), 2, num_workers=1, multiprocessing_context="fork")
        kept.append(iter(loader))
        next(kept[0])

    process = multiprocessing.get_context("fork").Process(target=rank)
    process.start()
    try:
        process.join(60)
        assert process.exitcode == 0
    finally:
        process.kill()


def refusal_of(make, given_to_boost=False):
    """What two replicas raise, whose dataloaders ``make`` makes with a plugin and a rank, in boost or a step."""

    def run():
        torch.manual_seed(0)
        booster = Booster(plugin=plugin())
        loader = make(booster.plugin, current_world().rank)
        model = nn.Linear(1, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        boosted = booster.boost(model, optimizer, nn.MSELoss(), loader if given_to_boost else None)
        booster.execute_pipeline(iter(loader), boosted.model, boosted.criterion, boosted.optimizer)

    with pytest.raises((DataError, ConfigError)) as caught:
        Loopback(2).run(run)
    return str(caught.value)


DATA = TensorDataset(torch.arange(16.0)[:, None], torch.zeros(16, 1))
UNLIKE_LOADERS = {
    "seed is 0 on rank 0, 1 on rank 1": lambda plugin, rank: plugin.prepare_dataloader(DATA, 2, True, seed=rank),
    "shuffle is False on rank 0, True on rank 1": lambda plugin, rank: plugin.prepare_dataloader(DATA, 2, rank == 1),
    "batch_size is 2 on rank 0, 4 on rank 1": lambda plugin, rank: plugin.prepare_dataloader(DATA, 2 + 2 * rank),
    "the length of the dataset is 16 on rank 0, 15 on rank 1": lambda plugin, rank: plugin.prepare_dataloader(
        [DATA[index] for index in range(16 - rank)], 2
    ),
}


@pytest.mark.parametrize("given_to_boost", [True, False], ids=["boost", "step"])
@pytest.mark.parametrize("told", UNLIKE_LOADERS)
def test_dataloaders_that_replicas_make_with_other_arguments_are_refused(told, given_to_boost):
    text = refusal_of(UNLIKE_LOADERS[told], given_to_boost)
    told = told.replace(" is ", " of the dataloader is ") if given_to_boost else told
    assert told in text
    assert "Call plugin.prepare_dataloader with the same arguments on every rank" in text


def test_a_pass_that_one_replica_begins_alone_is_told_if_it_shuffles():
    def make(plugin, rank):
        loader = plugin.prepare_dataloader(DATA, 2, shuffle=True)
        if rank == 1:
            next(iter(loader))
        return loader

    assert "the epoch is 0 on rank 0, 1 on rank 1" in refusal_of(make)
