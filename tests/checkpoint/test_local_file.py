"""Parts of stored tensors come to where they belong, read in one piece or copied."""

import io
import re

import pytest
import torch
from safetensors.torch import save_file

from hybridpp.checkpoint.boxes import Box
from hybridpp.checkpoint.find_tensors import opened
from hybridpp.checkpoint.local_file import fill_from
from hybridpp.checkpoint.ranged_file import WantedBox
from hybridpp.errors import CheckpointError

STORED = {
    "cube": torch.arange(60.0).reshape(3, 4, 5),
    "half": torch.arange(6).bfloat16(),
    "scalar": torch.tensor(2.5, dtype=torch.float64),
    "nothing": torch.empty(0, 3),
    "complex": torch.arange(4).to(torch.complex64),
    "float8": torch.arange(4).to(torch.float8_e4m3fn),
    "flags": torch.tensor([True, False]),
}
WHOLE = {name: Box((0,) * tensor.dim(), tuple(tensor.shape)) for name, tensor in STORED.items()}
PARTS = [
    *WHOLE.items(),
    ("cube", Box((1, 0, 0), (2, 4, 5))),
    ("cube", Box((1, 2, 0), (1, 2, 5))),
    ("cube", Box((2, 3, 1), (1, 1, 3))),
    ("cube", Box((0, 1, 0), (3, 2, 5))),
    ("cube", Box((0, 0, 4), (3, 4, 1))),
]
IN_PIECES = PARTS[-2:]


@pytest.fixture
def file(tmp_path):
    save_file(STORED, tmp_path / "file.safetensors")
    return tmp_path / "file.safetensors"


def wanted(name, box):
    stored = STORED[name]
    return WantedBox(name, str(stored.dtype).removeprefix("torch."), tuple(stored.shape), box)


@pytest.mark.parametrize("kind", ["as stored", "turned", "converted"])
@pytest.mark.parametrize(("name", "box"), PARTS)
def test_a_part_is_what_was_stored(file, monkeypatch, name, box, kind):
    expected, opens = STORED[name][box.slices], []
    monkeypatch.setattr("hybridpp.checkpoint.local_file.opened", lambda path: opens.append(path) or opened(path))
    if kind == "converted":
        expected = expected.to(torch.complex128 if expected.is_complex() else torch.float32)
        if expected.dtype == STORED[name].dtype:
            expected = expected.double()
    target = torch.zeros(box.shape[::-1], dtype=expected.dtype).permute([*reversed(range(expected.dim()))])
    target = target if kind == "turned" else target.contiguous()
    before = target._version
    fill_from(file, [(wanted(name, box), target)])
    assert target.to(torch.complex128).equal(expected.to(torch.complex128))
    assert target._version > before or not target.numel()
    is_read = target.is_contiguous() and kind != "converted" and (name, box) not in IN_PIECES
    assert len(opens) == (not is_read)


def test_a_file_that_ends_early_or_lacks_a_tensor_is_named(file):
    whole = wanted("cube", WHOLE["cube"])
    with pytest.raises(
        CheckpointError, match=r"its manifest says: other is missing, and should have shape \(3, 4, 5\)"
    ):
        fill_from(file, [(whole._replace(key="other"), torch.zeros(3, 4, 5))])
    with pytest.raises(CheckpointError, match=r"cube has shape .* and F32, and should have shape .* and F64"):
        fill_from(file, [(whole._replace(dtype="float64"), torch.zeros(3, 4, 5).double())])
    data = file.read_bytes()
    file.write_bytes(data[:-200])
    with pytest.raises(CheckpointError, match=re.escape(f"{file} is shorter than its header says")):
        fill_from(file, [(wanted(*item), torch.zeros_like(STORED[item[0]])) for item in WHOLE.items()])
    file.write_bytes(data[:4])
    with pytest.raises(CheckpointError, match="cannot be read as a safetensors file: it has no header"):
        fill_from(file, [(whole, torch.zeros(3, 4, 5))])
    file.unlink()
    with pytest.raises(CheckpointError, match="cannot be read: No such file"):
        fill_from(file, [(whole, torch.zeros(3, 4, 5))])


def test_a_file_may_give_less_at_a_time_than_it_has(file, monkeypatch):
    """As file systems of a network may."""

    class Slow(io.FileIO):
        def read(self, size=-1):
            return super().read(min(size, 7))

        def readinto(self, memory):
            return super().readinto(memory[:7])

    monkeypatch.setattr(type(file), "open", lambda path, mode, buffering: Slow(path, mode))
    target = torch.empty_like(STORED["cube"])
    fill_from(file, [(WantedBox("cube", "float32", (3, 4, 5), WHOLE["cube"]), target)])
    assert torch.equal(target, STORED["cube"])
