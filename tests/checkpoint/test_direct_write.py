"""What is written past the cache is what is read, on file systems that allow it and on others."""

import errno
import os

import pytest
import torch

from hybridpp.checkpoint import direct_write
from hybridpp.checkpoint.direct_write import Pages, write_pages


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    monkeypatch.setattr(direct_write, "BLOCK", 4096)


@pytest.mark.parametrize("size", [0, 1, 4096, 10_001])
@pytest.mark.parametrize("allowed", ["directly", "not opened so", "not written so", "in small pieces"])
def test_a_file_has_the_first_bytes_of_the_memory(tmp_path, monkeypatch, size, allowed):
    pages = Pages(size)
    assert pages.tensor.data_ptr() % 4096 == pages.tensor.numel() % 4096 == 0
    assert not pages.tensor.any()
    expected = torch.arange(size) % 251
    pages.tensor[:size] = expected
    write, opened, direct, seen = os.pwrite, os.open, set(), []

    def open_file(path, flags, mode=0o777):
        if flags & os.O_DIRECT and allowed == "not opened so":
            raise OSError(errno.EINVAL, "Invalid argument")
        descriptor = opened(path, flags & ~os.O_DIRECT, mode)
        direct.update([descriptor] if flags & os.O_DIRECT else [])
        return descriptor

    def write_file(descriptor, data, offset):
        assert offset % 4096 == 0 or descriptor not in direct or allowed == "in small pieces"
        if allowed == "not written so" and descriptor in direct:
            write(descriptor, data[:5], offset)
            raise OSError(errno.EINVAL, "Invalid argument")
        return write(descriptor, data[:1000] if allowed == "in small pieces" else data, offset)

    def after_block():
        """What was written is on its way to the disk, and its memory is free again."""
        done = min(4096 * len(seen), size)
        assert (tmp_path / "file").stat().st_size >= done
        assert not pages.tensor[:done].any()

    monkeypatch.setattr(os, "open", open_file)
    monkeypatch.setattr(os, "pwrite", write_file)
    write_pages(tmp_path / "file", pages, lambda data: seen.append(bytes(data)), after_block)
    assert (tmp_path / "file").read_bytes() == b"".join(seen) == bytes(expected.tolist())
    with pytest.raises(FileExistsError):
        write_pages(tmp_path / "file", pages, print, print)


def test_a_full_disk_is_an_error(tmp_path, monkeypatch):
    def full(descriptor, data, offset):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(OSError, match="No space left on device"):
        write_pages(tmp_path / "file", Pages(1), lambda data: None, print)
