"""Boxes of 2,000 random tensors: together they are the tensor, no element is in two, none is padding."""

import random
from math import prod

import pytest
import torch

from hybridpp.checkpoint.boxes import Box, Region, full_box, range_boxes, shard_regions, split_box
from hybridpp.sharding_plan import DimShard

NUM_CASES = 2_000


def random_case(generator):
    """A tensor of which tp ranks hold shards, and replicas pieces of those, in some order of dimensions in memory."""
    num_dims, size = generator.randint(0, 4), generator.choice([1, 2, 3, 4, 6])
    shape = [generator.randint(1, 7) for _ in range(num_dims)]
    order = generator.sample(range(num_dims), num_dims)
    shard = None
    if num_dims and generator.random() < 0.8:
        dim = generator.randrange(num_dims)
        widths = tuple(generator.randint(1, 9) for _ in range(generator.randint(1, 3)))
        shape[dim] = sum(widths)
        copies = tuple(generator.choice([c for c in (1, 2, 3, 6) if size % c == 0]) for _ in widths)
        shard = DimShard(dim, widths, copies)
    return tuple(shape), order, shard, size


def regions_of(shape, shard, rank, size, first_copies=True):
    if shard is None:
        return [Region(full_box(shape), (0,) * len(shape))] if rank == 0 or not first_copies else []
    return shard_regions(shape, shard.dim, list(shard.pieces()), rank, size, first_copies=first_copies)


def memory(tensor, order):
    """A tensor's elements in the order in which they lie in memory."""
    return tensor.permute(order).reshape(-1)


def test_the_boxes_of_all_ranks_are_the_tensor_and_no_element_is_in_two():
    generator = random.Random(0)
    for _ in range(NUM_CASES):
        shape, order, shard, size = random_case(generator)
        full = torch.arange(1, prod(shape) + 1).reshape(shape)
        seen = torch.zeros(shape, dtype=torch.int64)
        for rank in range(size):
            local = full if shard is None else shard.take(full, rank, size)
            cuts = sorted(generator.randint(0, local.numel()) for _ in range(generator.randint(0, 3)))
            flat = memory(local, order)
            for start, stop in zip([0, *cuts], [*cuts, local.numel()], strict=True):
                boxes, offset = range_boxes(local.shape, order, start, stop), start
                assert len(boxes) <= max(1, 2 * len(shape) - 1)
                for box in boxes:
                    assert torch.equal(memory(local[box.slices], order), flat[offset : offset + box.size])
                    offset += box.size
                    for region in regions_of(shape, shard, rank, size):
                        part = region.inside(box)
                        if part is not None:
                            mine = local[Box(part.local, part.box.shape).slices]
                            assert torch.equal(mine, full[part.box.slices])  # so it is no padding, which is 0
                            seen[part.box.slices] += 1
                assert offset == stop
        assert torch.equal(seen, torch.ones_like(seen))


def test_copies_hold_what_their_first_holder_holds():
    generator = random.Random(1)
    for _ in range(200):
        shape, _, shard, size = random_case(generator)
        full = torch.arange(1, prod(shape) + 1).reshape(shape)
        for rank in range(size):
            local = full if shard is None else shard.take(full, rank, size)
            filled = torch.zeros_like(local)
            for box, start in regions_of(shape, shard, rank, size, first_copies=False):
                filled[Box(start, box.shape).slices] = full[box.slices]
            assert torch.equal(filled, local), "padding is the only part that is left out"


def test_a_large_box_is_split_into_small_ones_in_order():
    generator = random.Random(2)
    for _ in range(200):
        shape = tuple(generator.randint(1, 6) for _ in range(generator.randint(0, 4)))
        limit = generator.randint(1, 40)
        full = torch.arange(prod(shape)).reshape(shape)
        parts = list(split_box(full_box(shape), limit))
        assert all(0 < box.size <= limit for box in parts)
        assert torch.equal(torch.cat([full[box.slices].reshape(-1) for box in parts]), full.reshape(-1))


@pytest.mark.parametrize(
    ("other", "common"),
    [
        (Box((1, 1), (5, 5)), Box((1, 1), (1, 2))),
        (Box((0, 0), (2, 3)), Box((0, 0), (2, 3))),
        (Box((2, 0), (1, 1)), None),
        (Box((0, 3), (2, 1)), None),
    ],
)
def test_intersections_of_boxes(other, common):
    box = Box((0, 0), (2, 3))
    assert box.intersection(other) == other.intersection(box) == common


def test_scalars_and_empty_tensors():
    assert range_boxes((), (), 0, 1) == [Box((), ())]
    assert range_boxes((3, 0), (0, 1), 0, 0) == []
    assert Box((), ()).intersection(Box((), ())) == Box((), ())
    assert shard_regions((4, 0), 0, [(4, 1)], 0, 2, first_copies=True) == []
