"""What is written past the cache is what is read, on file systems that allow it and on others."""

import errno
import os

import pytest
import torch

from hybridpp.checkpoint.direct_write import pages, write_pages


@pytest.mark.parametrize("size", [0, 1, 4096, 10_001])
@pytest.mark.parametrize("allowed", ["directly", "not opened so", "not written so", "in small pieces"])
def test_a_file_has_the_first_bytes_of_the_memory(tmp_path, monkeypatch, size, allowed):
    memory = pages(size)
    assert memory.data_ptr() % 4096 == memory.numel() % 4096 == 0
    assert not memory[size:].any()
    memory[:size] = torch.arange(size) % 251
    write, opened, direct = os.write, os.open, set()

    def open_file(path, flags, mode=0o777):
        if flags & os.O_DIRECT and allowed == "not opened so":
            raise OSError(errno.EINVAL, "Invalid argument")
        descriptor = opened(path, flags & ~os.O_DIRECT, mode)
        direct.update([descriptor] if flags & os.O_DIRECT else [])
        return descriptor

    def write_file(descriptor, data):
        if allowed == "not written so" and descriptor in direct:
            write(descriptor, data[:5])
            direct.clear()
            raise OSError(errno.EINVAL, "Invalid argument")
        return write(descriptor, data[:1000] if allowed == "in small pieces" else data)

    monkeypatch.setattr(os, "open", open_file)
    monkeypatch.setattr(os, "write", write_file)
    write_pages(tmp_path / "file", memory, size)
    assert (tmp_path / "file").read_bytes() == bytes(memory[:size].tolist())
    with pytest.raises(FileExistsError):
        write_pages(tmp_path / "file", memory, size)


def test_a_full_disk_is_an_error(tmp_path, monkeypatch):
    def full(descriptor, data):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(OSError, match="No space left on device"):
        write_pages(tmp_path / "file", pages(1), 1)
