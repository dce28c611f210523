import itertools
import random

import pytest

from hybridpp.data_parallel.layout import (
    ALIGNMENT,
    GRAIN,
    ParameterInfo,
    ShardLayout,
    distribute_bucket,
    divide_bucket,
    plan_buckets,
)
from hybridpp.optim.gradient_norm import NORM_BLOCK

SIZES = [0, 1, 15, 16, 17, 100, 2047, 2048, 2049, 4096, 9000, 40_000]


def random_parameters(rng: random.Random, kinds: int = 2) -> dict[str, ParameterInfo]:
    infos = {}
    for index in range(rng.randint(1, 12)):
        size = rng.choice(SIZES)
        # Whole, or shared, by the kind, as parameters of one optimizer group or one set of ranks are.
        kind = rng.randrange(kinds)
        infos[f"p{index}"] = ParameterInfo(
            size, 4 * size, kind, rng.choice([(), (0,), (1,)]), kind != 1, rng.random() < 0.2
        )
    return infos


@pytest.mark.parametrize("seed", range(20))
def test_pieces_of_all_replicas_are_every_element_once(seed):
    rng = random.Random(seed)
    for _ in range(100):
        infos, num_segments = random_parameters(rng), rng.choice([1, 2, 3, 4, 8])
        layouts = [plan_buckets(infos, rng.choice([1, 64_000]), num_segments, 0)]
        layouts += [ShardLayout(layouts[0].buckets, num_segments, index) for index in range(1, num_segments)]
        held = {name: [] for name in infos}
        for layout in layouts:
            for name, piece in layout.pieces.items():
                assert piece.name == name
                held[name].append((piece.start, piece.stop))
        for name, info in infos.items():
            ends = [0, *(stop for _, stop in sorted(held[name]))]
            assert ends == [*(start for start, _ in sorted(held[name])), info.size]


@pytest.mark.parametrize("seed", range(10))
def test_slots_are_aligned_apart_and_inside_the_bucket(seed):
    rng = random.Random(seed)
    for _ in range(100):
        infos, num_segments = random_parameters(rng), rng.choice([1, 2, 3, 8])
        for bucket in plan_buckets(infos, 64_000, num_segments, 0).buckets:
            slots = sorted(bucket.slots, key=lambda slot: slot.start)
            assert all(slot.start % ALIGNMENT == 0 for slot in slots)
            assert all(a.start + a.size <= b.start for a, b in itertools.pairwise(slots))
            assert slots[-1].start + slots[-1].size <= bucket.size == bucket.segment_size * num_segments
            assert {infos[slot.name].kind for slot in slots} == {infos[slots[0].name].kind}
            assert bucket.is_shared == infos[slots[0].name].is_shared


@pytest.mark.parametrize("num_segments", [2, 3, 7])
def test_parameters_are_divided_at_multiples_of_the_grain_from_their_start(num_segments):
    rng = random.Random(0)
    for _ in range(200):
        sizes = {f"p{index}": rng.choice(SIZES) for index in range(rng.randint(1, 9))}
        bucket = divide_bucket(sizes, num_segments)
        for index in range(num_segments):
            assert all(piece.start % GRAIN == 0 for piece in bucket.pieces(index))
        padding = bucket.size - sum(-(-size // ALIGNMENT) * ALIGNMENT for size in sizes.values())
        assert padding <= 2 * GRAIN * num_segments


def test_parameters_that_are_not_divisible_lie_in_one_segment():
    bucket = distribute_bucket({"a": 100, "b": 60, "c": 30, "d": 40, "e": 0}, 2)
    pieces = [[piece.name for piece in bucket.pieces(index)] for index in range(2)]
    assert pieces == [["a", "c"], ["b", "d", "e"]]
    assert all(piece.is_whole for index in range(2) for piece in bucket.pieces(index))


def test_one_replica_has_everything_without_padding():
    layout = plan_buckets({"a": ParameterInfo(32, 128), "b": ParameterInfo(16, 64)}, 1e6, 1, 0)
    assert [bucket.size for bucket in layout.buckets] == [48]
    assert [piece.is_whole for piece in layout.pieces.values()] == [True, True]


def test_a_kind_with_few_parameters_does_not_hold_up_the_others():
    infos = {f"p{index}": ParameterInfo(100, 400, "norm" if index % 2 else "linear") for index in range(8)}
    layout = plan_buckets(infos, 800, 2, 0)
    assert [[slot.name for slot in bucket.slots] for bucket in layout.buckets] == [
        ["p7", "p5"],
        ["p6", "p4"],
        ["p3", "p1"],
        ["p2", "p0"],
    ]


def test_later_stages_come_first_and_what_no_stage_uses_comes_last():
    stages = {"unused": (), "a": (0,), "b": (0, 2), "c": (2,), "d": (0,)}
    infos = {name: ParameterInfo(10, 40, stages=used_in) for name, used_in in stages.items()}
    layout = plan_buckets(infos, 1e6, 2, 0)
    assert [[slot.name for slot in bucket.slots] for bucket in layout.buckets] == [["c"], ["b"], ["d", "a"], ["unused"]]
    assert [bucket.stages for bucket in layout.buckets] == [(2,), (0, 2), (0,), ()]


def test_a_parameter_above_the_capacity_has_its_own_bucket():
    infos = {name: ParameterInfo(size, 4 * size) for name, size in (("a", 10), ("b", 5000), ("c", 10))}
    layout = plan_buckets(infos, 400, 2, 1)
    assert [[slot.name for slot in bucket.slots] for bucket in layout.buckets] == [["c"], ["b"], ["a"]]
    assert layout.pieces["b"].start == 4096


def test_no_parameters_make_no_buckets():
    assert plan_buckets({}, 400, 2, 1).buckets == ()


def test_pieces_begin_where_blocks_of_the_norm_begin():
    assert GRAIN % NORM_BLOCK == 0
