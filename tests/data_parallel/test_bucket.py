import torch
from torch import nn

from hybridpp.data_parallel.bucket import Bucket, split_into_buckets


def parameters(*shapes, dtype=torch.float32):
    return {f"p{n}": nn.Parameter(torch.zeros(shape, dtype=dtype)) for n, shape in enumerate(shapes)}


def test_views_share_the_buffer_start_aligned_and_do_not_overlap():
    bucket = Bucket(parameters((3,), (4, 5), (17,)))
    for number, view in enumerate(bucket.views.values(), start=1):
        assert view.storage_offset() % 16 == 0
        view.fill_(number)
    assert [view.unique().tolist() for view in bucket.views.values()] == [[1.0], [2.0], [3.0]]
    assert bucket.flat.sum() == 3 + 2 * 20 + 3 * 17
    assert bucket.flags.tolist() == [0.0] * 3


def test_views_have_the_strides_of_dense_parameters():
    parameter = nn.Parameter(torch.zeros(2, 3, 4, 5).to(memory_format=torch.channels_last))
    assert Bucket({"weight": parameter}).views["weight"].stride() == parameter.stride()


def test_half_precision_gradients_are_accumulated_in_fp32():
    assert Bucket(parameters((2,), dtype=torch.bfloat16)).flat.dtype == torch.float32
    assert Bucket(parameters((2,), dtype=torch.float64)).flat.dtype == torch.float64


def test_buckets_hold_consecutive_parameters_of_one_dtype_up_to_capacity():
    found = parameters((100,), (100,), (300,), (100,))
    found["p3"] = nn.Parameter(found["p3"].double())
    buckets = [list(chunk) for chunk in split_into_buckets(found, capacity_mib=1000 / 2**20)]
    assert buckets == [["p0", "p1"], ["p2"], ["p3"]]
