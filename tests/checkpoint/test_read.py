"""Tensors are read one at a time, and what was read does not stay in memory."""

from contextlib import contextmanager

import pytest
import torch
from safetensors.torch import save_file
from support import assert_same

from hybridpp.checkpoint import read
from hybridpp.checkpoint.find_tensors import find_tensors, opened


@pytest.mark.parametrize("limit", [1, 100, 2**25])
def test_files_are_mapped_anew_after_some_bytes(limit, tmp_path, monkeypatch):
    tensors = {f"t{index}": torch.full((5, 2), float(index)) for index in range(6)}
    tensors |= {"half": torch.ones(7, dtype=torch.bfloat16), "flag": torch.ones(3, dtype=torch.bool)}
    for number, names in enumerate((list(tensors)[:5], list(tensors)[5:])):
        save_file({name: tensors[name] for name in names}, tmp_path / f"{number}.safetensors")
    times = []

    @contextmanager
    def noted(file):
        times.append(file.name)
        with opened(file) as handle:
            yield handle

    locations = find_tensors(tmp_path)
    monkeypatch.setattr(read, "opened", noted)
    monkeypatch.setattr(read, "_MAX_MAPPED_BYTES", limit)
    assert_same({name: stored.full().clone() for name, stored in read.open_tensors(locations)}, tensors)
    assert len(times) == {1: 8, 100: 4, 2**25: 2}[limit]


def test_sizes_in_bytes_are_those_of_the_dtypes(tmp_path):
    tensors = {
        str(dtype): torch.zeros(3, 4, dtype=dtype)
        for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.uint8, torch.bool, torch.float8_e4m3fn)
    }
    save_file(tensors, tmp_path / "model.safetensors")
    for name, stored in read.open_tensors(find_tensors(tmp_path)):
        assert stored.nbytes == tensors[name].nbytes
