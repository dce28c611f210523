"""Damage is found and named before anything is read into a tensor."""

import json
import re

import pytest
import torch
from checkpoint_folders import full_holding, save, tensors_of

from hybridpp.checkpoint.commit import step_folder
from hybridpp.checkpoint.manifest import MANIFEST
from hybridpp.checkpoint.reader import fill, plan_reads, read_manifest, verify_file
from hybridpp.errors import CheckpointError


def test_one_flipped_bit_in_any_file_is_found_and_the_file_named(tmp_path):
    manifest, folder = save(tmp_path, 1), step_folder(tmp_path, 1)
    for name in manifest.files:
        data = (folder / name).read_bytes()
        for position in range(0, len(data), 29):
            flipped = bytearray(data)
            flipped[position] ^= 1 << position % 8
            (folder / name).write_bytes(flipped)
            with pytest.raises(CheckpointError, match=f"^{name} is damaged"):
                verify_file(folder, read_manifest(folder), name)
        (folder / name).write_bytes(data)
        verify_file(folder, manifest, name)


def test_a_missing_manifest_and_a_missing_file_are_named(tmp_path):
    manifest, folder = save(tmp_path, 1), step_folder(tmp_path, 1)
    with pytest.raises(CheckpointError, match="cannot be read: No such file"):
        verify_file(tmp_path, manifest, next(iter(manifest.files)))
    (folder / MANIFEST).unlink()
    with pytest.raises(CheckpointError, match=r"manifest\.json cannot be read: No such file"):
        read_manifest(folder)


def test_missing_tensors_and_other_shapes_are_refused(tmp_path):
    tensors = save(tmp_path, 1).tensors
    with pytest.raises(CheckpointError, match="weights/9 is missing"):
        plan_reads(tensors, [full_holding("weights/9", torch.zeros(1))])
    text = re.escape("weights/0 has shape (6, 4) in the checkpoint, and (4, 6) here")
    with pytest.raises(CheckpointError, match=text):
        plan_reads(tensors, [full_holding("weights/0", torch.zeros(4, 6))])


def test_a_file_that_is_not_what_its_manifest_says_is_refused(tmp_path):
    """As an attacker would write it: the digests are right."""
    manifest, folder = save(tmp_path, 1), step_folder(tmp_path, 1)
    target = {key: torch.zeros_like(tensor) for key, tensor in tensors_of(0).items()}
    reads = plan_reads(manifest.tensors, [full_holding(key, tensor) for key, tensor in target.items()])
    for name in manifest.files:
        data = (folder / name).read_bytes()
        size = int.from_bytes(data[:8], "little")
        header = {
            key: {**entry, "shape": entry["shape"][::-1]} for key, entry in json.loads(data[8 : 8 + size]).items()
        }
        text = json.dumps(header).encode().ljust(size)
        (folder / name).write_bytes(data[:8] + text + data[8 + size :])
    with pytest.raises(CheckpointError, match=r"is not what its manifest says: weights/0#\d has shape \(2, 6\)"):
        fill(folder, reads)
