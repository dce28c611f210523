"""Who sees which samples."""

import random
from itertools import chain

import numpy
import pytest
import torch
from support import IMAGE, boosted, model_loss, sgd, tiny_vit
from torch.utils.data import Dataset, TensorDataset

from hybridpp import Booster, HybridParallelPlugin
from hybridpp.cluster import Loopback, current_world
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


def test_a_loop_over_epochs_with_uneven_replicas_takes_every_rank_the_same_number_of_steps():
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
