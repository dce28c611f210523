"""Data files are plain safetensors files, of bounded size, with the digest of what is on disk."""

import errno
import os
from math import prod

import pytest
import torch
from checkpoint_folders import full_holding, halves, save, tensors_of
from safetensors.torch import load_file

from hybridpp.checkpoint.boxes import Box, full_box
from hybridpp.checkpoint.commit import step_folder
from hybridpp.checkpoint.file_images import file_images, write_images
from hybridpp.checkpoint.manifest import STORED_DTYPES, check
from hybridpp.checkpoint.reader import fill, plan_reads, verify_file
from hybridpp.checkpoint.writer import Holding, write_holdings
from hybridpp.errors import CheckpointError


def test_files_are_read_by_safetensors_and_hold_each_element_once(tmp_path):
    manifest = save(tmp_path, 1)
    folder = step_folder(tmp_path, 1)
    stored = {key: tensor for name in manifest.files for key, tensor in load_file(folder / name).items()}
    assert sum(tensor.numel() for tensor in stored.values()) == 3 * 24
    for key, tensor in tensors_of(0).items():
        for box, file, name in manifest.tensors[key].chunks:
            assert file in manifest.files
            assert torch.equal(stored[name], tensor[box.slices])


@pytest.mark.covering
@pytest.mark.parametrize("dtype", STORED_DTYPES)
@pytest.mark.parametrize("shape", [(), (0, 3), (5,), (2, 3, 4)])
def test_every_dtype_and_shape_comes_back_bit_for_bit(tmp_path, dtype, shape):
    kind = getattr(torch, dtype)
    raw = torch.randint(0, 2, (prod(shape) * kind.itemsize,), dtype=torch.uint8)
    tensor = raw.view(kind).reshape(shape)
    holdings = [full_holding("x", tensor), full_holding("byte", torch.ones(1).byte())]
    manifest = save(tmp_path, 1, holdings=holdings)
    images = write_images(tmp_path, "later", file_images(holdings))
    assert [*images.files.values()] == sorted(manifest.files.values()), "in the background, they are the same bytes"
    target = torch.zeros(shape, dtype=kind)
    fill(step_folder(tmp_path, 1), plan_reads(manifest.tensors, [full_holding("x", target)]))
    assert torch.equal(target.reshape(-1).view(torch.uint8), raw)


def test_views_in_any_order_of_memory_and_conversions(tmp_path):
    image = torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)
    narrow = Holding("half", torch.bfloat16, (2, 3, 4, 5), [(full_box(image.shape), image)])
    manifest = save(tmp_path, 1, holdings=[halves("image", image.mT), narrow], file_bytes=64)
    targets = [torch.zeros(2, 3, 5, 4), torch.zeros(2, 3, 4, 5)]
    fill(
        step_folder(tmp_path, 1),
        plan_reads(manifest.tensors, [full_holding("image", targets[0]), full_holding("half", targets[1])]),
    )
    assert torch.equal(targets[0], image.mT)
    assert torch.equal(targets[1], image.bfloat16().float())
    check(manifest)


def test_files_hold_what_they_may_and_large_tensors_are_split(tmp_path):
    tensors = [torch.randn(50, 3), torch.randn(7), torch.randn(1, 90)]
    holdings = [full_holding(str(n), tensor) for n, tensor in enumerate(tensors)]
    manifest = save(tmp_path, 1, holdings=holdings, file_bytes=100)
    folder = step_folder(tmp_path, 1)
    for name in manifest.files:
        assert sum(tensor.nbytes for tensor in load_file(folder / name).values()) <= 100
        verify_file(folder, manifest, name)
    targets = [torch.zeros_like(tensor) for tensor in tensors]
    fill(folder, plan_reads(manifest.tensors, [full_holding(str(n), target) for n, target in enumerate(targets)]))
    assert all(map(torch.equal, targets, tensors))


def test_only_what_is_held_is_read(tmp_path):
    """By the bytes that the wanted boxes have."""
    tensor = torch.randn(64, 64)
    manifest = save(tmp_path, 1, holdings=[full_holding("x", tensor)], file_bytes=2**20)
    target = torch.zeros(64, 8)
    box = Box((0, 8), (64, 8))
    reads = plan_reads(manifest.tensors, [Holding("x", tensor.dtype, (64, 64), [(box, target)])])
    assert [read.source for read in reads] == [box]
    fill(step_folder(tmp_path, 1), reads)
    assert torch.equal(target, tensor[:, 8:16])


def test_a_dtype_that_files_cannot_hold_is_refused_by_name(tmp_path):
    with pytest.raises(CheckpointError, match="x has dtype complex128, which safetensors files cannot hold"):
        save(tmp_path, 1, holdings=[full_holding("x", torch.zeros(1, dtype=torch.complex128))])


def test_a_full_disk_leaves_no_files(tmp_path, monkeypatch):
    synced = []

    def fsync(handle):
        synced.append(handle)
        if len(synced) == 2:
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", fsync)
    holdings = [full_holding(str(n), torch.zeros(8)) for n in range(4)]
    with pytest.raises(OSError, match="No space left"):
        write_holdings(tmp_path, "rank-00000.01234567", holdings, 32)
    assert list(tmp_path.iterdir()) == []
