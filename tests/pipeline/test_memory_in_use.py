"""What is read of the memory in use."""

import torch

from hybridpp.pipeline import memory_in_use
from hybridpp.pipeline.memory_in_use import memory_reader

CPU, MIB = torch.device("cpu"), 2**20


def grows_by(read, num_bytes):
    before = read()
    held = torch.zeros(num_bytes, dtype=torch.uint8)
    after = read()
    del held
    return after - before, read() - before


def test_it_follows_tensors_on_the_cpu():
    reader = memory_reader(CPU)
    assert reader is not None
    grown, left = grows_by(reader.read, 64 * MIB)
    assert 64 * MIB <= grown < 66 * MIB
    assert abs(left) < 2 * MIB


def test_pages_are_read_where_tensors_come_from_another_malloc(monkeypatch):
    monkeypatch.setattr(memory_in_use, "_malloc_reader", lambda: lambda: 0)
    reader = memory_reader(CPU)
    assert reader.kind == "resident"
    grown, _ = grows_by(reader.read, 64 * MIB)
    assert grown >= 60 * MIB


def test_a_host_that_does_not_say_has_no_reader(monkeypatch):
    monkeypatch.setattr(memory_in_use, "_malloc_reader", lambda: None)
    monkeypatch.setattr(memory_in_use.Path, "exists", lambda self: False)
    assert memory_reader(CPU) is None


def test_another_libc_has_no_malloc_to_read(monkeypatch):
    memory_in_use._malloc_reader.cache_clear()
    monkeypatch.setattr(memory_in_use.ctypes, "CDLL", lambda name: object())
    try:
        assert memory_in_use._malloc_reader() is None
    finally:
        memory_in_use._malloc_reader.cache_clear()


def test_a_cuda_device_is_read_from_torch():
    assert memory_reader(torch.device("cuda", 0)).kind == "device"
