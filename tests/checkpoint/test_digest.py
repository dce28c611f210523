"""Digests find changes; a checkpoint says by which algorithm."""

import pytest
import torch

from hybridpp.checkpoint import digest as digests
from hybridpp.checkpoint.digest import ALGORITHM, bytes_match, file_matches, new_digest, tensor_digest, written_as
from hybridpp.errors import CheckpointError


@pytest.mark.parametrize("algorithm", ["xxh3_128", "blake2b"])
def test_files_and_bytes_are_compared(tmp_path, monkeypatch, algorithm):
    monkeypatch.setattr(digests, "_BLOCK", 7)
    digest, data = new_digest(algorithm), bytes(range(100))
    digest.update(data[:50])
    digest.update(memoryview(data[50:]))
    stored = f"{algorithm}:{digest.hexdigest()}"
    (tmp_path / "file").write_bytes(data)
    assert file_matches(stored, tmp_path / "file")
    assert bytes_match(stored, data)
    assert not bytes_match(stored, data[1:])
    (tmp_path / "file").write_bytes(data[:-1] + b"x")
    assert not file_matches(stored, tmp_path / "file")


def test_the_fast_one_is_written_where_it_is_installed():
    assert ALGORITHM == "xxh3_128"
    assert written_as(new_digest()).startswith("xxh3_128:")


def test_an_unknown_algorithm_is_an_error(monkeypatch):
    with pytest.raises(CheckpointError, match=r"digests by 'crc' cannot be computed here\. Use the version that"):
        new_digest("crc")
    monkeypatch.delitem(digests._ALGORITHMS, "xxh3_128")
    with pytest.raises(CheckpointError, match="Install the package xxhash"):
        new_digest("xxh3_128")


def test_tensors_are_told_apart_by_their_values_alone():
    tensor = torch.randn(2, 3)
    assert tensor_digest(tensor) == tensor_digest(tensor.T.clone().T) != tensor_digest(tensor + 1)
    assert tensor_digest(torch.zeros(0)) != tensor_digest(torch.tensor(True))
