import zlib

import pytest
import torch

from hybridpp.cluster import HostCopy


@pytest.mark.parametrize("early", [False, True])
def test_numbers_come_in_order_and_bytes_as_a_digest(early):
    numbers = [torch.tensor([1.5, -2.0], dtype=torch.float64), torch.empty(0), torch.tensor([0.1], dtype=torch.float64)]
    bytes_of = [torch.tensor([3, 4], dtype=torch.uint8), torch.tensor([5], dtype=torch.uint8)]
    assert HostCopy(numbers, [], early=early).read() == ([1.5, -2.0, 0.1], -1.0)
    assert HostCopy(numbers, bytes_of, early=early).read() == ([1.5, -2.0, 0.1], float(zlib.crc32(b"\3\4\5")))


def test_nothing_is_no_number_and_no_digest():
    assert HostCopy([], [], early=False).read() == ([], -1.0)
