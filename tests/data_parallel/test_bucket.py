import pytest
import torch
from torch import nn

from hybridpp.cluster import Loopback, current_world
from hybridpp.data_parallel import GradientSharding, layout_of
from hybridpp.data_parallel.bucket import Bucket


def parameters(*shapes, dtype=torch.float32):
    return {f"p{n}": nn.Parameter(torch.zeros(shape, dtype=dtype)) for n, shape in enumerate(shapes)}


def buckets_of(found, capacity_mib=1.0, **options):
    layout = layout_of(found, current_world().control(), capacity_mib, **options)
    return [Bucket(bucket, found) for bucket in layout.buckets]


def test_views_share_the_buffer_start_aligned_and_do_not_overlap():
    [bucket] = buckets_of(parameters((3,), (4, 5), (17,)))
    for name, view in bucket.views.items():
        assert view.storage_offset() % 16 == 0
        view.fill_(int(name[1:]) + 1)
    assert {name: view.unique().tolist() for name, view in bucket.views.items()} == {"p2": [3], "p1": [2], "p0": [1]}
    assert bucket.flat.sum() == 3 + 2 * 20 + 3 * 17


@pytest.mark.parametrize("sharding", [GradientSharding.STEP, GradientSharding.MICROBATCH])
def test_the_sum_is_kept_apart_from_a_buffer_that_can_be_freed(sharding):
    found = parameters((3,), (4, 5), (17,))
    layout = layout_of(found, current_world().control(), 1.0)
    bucket = Bucket(layout.buckets[0], found, sharding=sharding)
    assert (bucket.is_open, bucket.flat.untyped_storage().nbytes()) == (False, 0)
    bucket.open()
    gaps = torch.cat([bucket.flat[gap] for gap in layout.buckets[0].gaps()])
    assert gaps.numel() == layout.buckets[0].size - 40
    assert not gaps.any()
    for view in bucket.views.values():
        view.fill_(1)
    for expected in (1, 2):
        bucket.launch_reduce(current_world().control(), None, scatter=True)
        bucket.wait()
        assert bucket.complete().sum() == 40 * expected
    bucket.close()
    bucket.set_aside()
    assert (bucket.aside, bucket.complete().sum()) == (None, 80)
    bucket.clear()
    assert not bucket.complete().any()


@pytest.mark.parametrize("sharding", [GradientSharding.NONE, GradientSharding.SCATTERED])
def test_what_is_set_aside_is_added_after_the_next_reduction(sharding):
    def run():
        group = current_world().control()
        found = parameters((5000,))
        bucket = Bucket(layout_of(found, group, 1.0).buckets[0], found, group.rank, sharding)
        sums = []
        for number in (1.0, 2.0, 4.0):
            bucket.views["p0"].fill_(number + group.rank)
            bucket.launch_reduce(group, torch.float16, scatter=sharding is GradientSharding.SCATTERED)
            bucket.wait()
            own = bucket.views["p0"] if sharding is GradientSharding.NONE else bucket.complete()[:5000]
            sums.append(own.unique().tolist())
            bucket.set_aside()
        bucket.clear()
        return sums, bucket.aside

    # 1 + 2, then 2 + 3 more, and 4 + 5; of two segments, the second one ends with padding.
    for rank, (sums, aside) in enumerate(Loopback(2).run(run)):
        padding = [0.0] if rank and sharding is GradientSharding.SCATTERED else []
        assert sums == [[*padding, 3.0], [*padding, 8.0], [*padding, 17.0]]
        assert aside is None


def test_samples_of_complex_gradients_are_real():
    [bucket] = buckets_of(parameters((3, 5), dtype=torch.complex64))
    bucket.flat[1] = 2 + 3j
    sample = bucket.sample(2 * bucket.layout.size)
    assert sample.dtype is torch.float32
    assert sample[:4].tolist() == [0, 0, 2, 3]


def test_views_have_the_strides_of_dense_parameters():
    parameter = nn.Parameter(torch.zeros(2, 3, 4, 5).to(memory_format=torch.channels_last))
    assert buckets_of({"weight": parameter})[0].views["weight"].stride() == parameter.stride()


def test_half_precision_gradients_are_accumulated_in_fp32():
    assert buckets_of(parameters((2,), dtype=torch.bfloat16))[0].flat.dtype == torch.float32
    assert buckets_of(parameters((2,), dtype=torch.float64))[0].flat.dtype == torch.float64


def test_buckets_hold_parameters_of_one_dtype_and_stage_up_to_capacity():
    found = parameters((100,), (100,), (300,), (100,), (50,))
    found["p3"] = nn.Parameter(found["p3"].double())
    stages = {"p0": (0,), "p1": (0,), "p2": (0,), "p3": (0,), "p4": (1,)}
    names = [list(bucket.views) for bucket in buckets_of(found, 1000 / 2**20, stages=stages)]
    assert names == [["p4"], ["p3"], ["p2"], ["p1", "p0"]]
