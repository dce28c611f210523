"""A placeholder looks like the value that it stands for, takes no memory, and cannot pass for a result."""

import pytest
import torch

from hybridpp.partition import TensorSpec
from hybridpp.partition.placeholders import Placeholders

PLACEHOLDERS = Placeholders(torch.device("cpu"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.complex64])
def test_numbers_are_nan_so_that_whoever_reads_them_shows(dtype):
    found = PLACEHOLDERS.get(TensorSpec((2, 3), dtype, requires_grad=True))
    assert (found.shape, found.dtype) == ((2, 3), dtype)
    assert torch.isnan(found).all()
    assert torch.isnan(found.sum() * 0)


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool])
def test_what_cannot_be_nan_is_zero(dtype):
    found = PLACEHOLDERS.get(TensorSpec((4,), dtype, requires_grad=False))
    assert found.dtype == dtype
    assert not found.any()


def test_all_of_one_dtype_share_one_number_of_memory():
    small, large = (PLACEHOLDERS.get(TensorSpec(shape, torch.float64, False)) for shape in ((1,), (10_000, 10_000)))
    assert small.data_ptr() == large.data_ptr()
    assert large.untyped_storage().nbytes() == 8


def test_nobody_can_write_to_one():
    with pytest.raises(RuntimeError, match="more than one element of the written-to tensor refers to a single memory"):
        PLACEHOLDERS.get(TensorSpec((2,), torch.float32, False)).add_(1.0)
