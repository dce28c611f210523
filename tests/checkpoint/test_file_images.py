"""Files that wait in host memory are those that would be written at once."""

import pytest
import torch

from hybridpp.checkpoint.boxes import full_box
from hybridpp.checkpoint.file_images import file_images, write_images
from hybridpp.checkpoint.writer import Holding, write_holdings


@pytest.mark.parametrize("file_bytes", [64, 2**20])
def test_images_are_the_same_files_and_do_not_follow_the_run(tmp_path, file_bytes):
    torch.manual_seed(0)
    tensors = {
        "rows": torch.randn(6, 4)[:, 1:3],
        "half": torch.randn(5).bfloat16(),
        "flags": torch.tensor([True, False, True]),
        "number": torch.tensor(3.5, dtype=torch.float64),
        "nothing": torch.empty(0, 3),
    }
    holdings = [Holding.of_all(*item) for item in tensors.items()]
    holdings.append(Holding("rounded", torch.float16, (5,), [(full_box((5,)), torch.randn(5))]))
    at_once = write_holdings(tmp_path, "rank-00000.00000000", holdings, file_bytes)
    images = file_images(holdings, file_bytes)
    for tensor in tensors.values():
        tensor.zero_()
    later = write_images(tmp_path, "rank-00000.11111111", images)
    assert list(later.files.values()) == list(at_once.files.values()), "sizes and digests"
    assert len(later.files) == (1 if file_bytes > 64 else 2)
    assert later.tensors.keys() == at_once.tensors.keys()
