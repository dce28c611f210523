"""Files that are written tensor by tensor are those that safetensors reads."""

import json
import re

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from hybridpp.checkpoint.safetensors_file import StoredHeader, StoredSpec, header, write_safetensors
from hybridpp.errors import CheckpointError

TENSORS = {
    "wide": torch.randn(3, 5, dtype=torch.float64),
    "strided": torch.randn(4, 6).t(),
    "half": torch.randn(3, dtype=torch.bfloat16),
    "scalar": torch.tensor(7, dtype=torch.int8),
    "none": torch.empty(0, 4, dtype=torch.bool),
}


def test_a_file_reads_as_it_was_written_and_takes_one_tensor_at_a_time(tmp_path):
    events = []

    def taken():
        for name, tensor in TENSORS.items():
            events.append(name)
            yield tensor

    specs = {name: StoredSpec.of(tensor) for name, tensor in TENSORS.items()}
    write_safetensors(tmp_path / "x.safetensors", specs, taken(), events.append)
    assert events == [event for name, spec in specs.items() for event in (name, spec.nbytes)]
    loaded = load_file(tmp_path / "x.safetensors")
    assert {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in loaded.items()} == specs
    assert all(torch.equal(loaded[name], tensor) for name, tensor in TENSORS.items())
    with safe_open(tmp_path / "x.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt"}


def test_what_does_not_fit_is_refused(tmp_path):
    for spec, text in (
        (StoredSpec(torch.float32, (2,)), "x has shape (3,), and (2,) was expected"),
        (StoredSpec(torch.complex128, (3,)), "x has dtype complex128, which safetensors files cannot hold"),
    ):
        with pytest.raises(CheckpointError, match=re.escape(text)):
            write_safetensors(tmp_path / "x.safetensors", {"x": spec}, [torch.ones(3)])


HEADERS = {
    "another dtype": ({"a": {"dtype": "I32", "shape": [2], "data_offsets": [0, 8]}}, "a has shape (2,) and I32"),
    "unknown dtype": ({"a": {"dtype": "X", "shape": [2], "data_offsets": [0, 8]}}, "dtype is 'X', and must be one of"),
    "too large": ({"a": {"dtype": "F32", "shape": [2**62], "data_offsets": [0, 8]}}, "must be one of at most"),
    "other size": (
        {"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}},
        "is [0, 4], and must be 8 bytes",
    ),
    "text": ({"a": {"dtype": "F32", "shape": "2", "data_offsets": [0, 8]}}, "shape is '2', and must be a list"),
    "one more": (
        {
            "a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]},
            "b": {"dtype": "F32", "shape": [0], "data_offsets": [8, 8]},
        },
        "it holds 'b', too",
    ),
    "a gap": ({"a": {"dtype": "F32", "shape": [2], "data_offsets": [4, 12]}}, "a part begins at 4, not at 0"),
    "list": ([], "its header is [], and must be an object"),
    "metadata": ({"__metadata__": {"a": 1}}, "its metadata['a'] is 1, and must be text"),
    "none": ({}, "a is missing, and should have shape (2,) and F32"),
}


@pytest.mark.parametrize("what", HEADERS)
def test_a_header_is_checked_as_a_whole_against_what_is_expected(what):
    content, text = HEADERS[what]
    head = json.dumps(content).encode()
    data = len(head).to_bytes(8, "little") + head + bytes(8)
    with pytest.raises(CheckpointError, match=re.escape(text)):
        StoredHeader("x", lambda start, end: data[start:end]).check_parts({"a": ("float32", (2,))}, len(data))


def test_a_file_has_as_many_bytes_as_its_header_says():
    data = header([("a", StoredSpec(torch.float32, (2,)))]) + bytes(9)
    stored = StoredHeader("x", lambda start, end: data[start:end])
    stored.check_parts({"a": ("float32", (2,))}, len(data) - 1)
    with pytest.raises(CheckpointError, match=f"it has {len(data)} bytes, and its header says {len(data) - 1}"):
        stored.check_parts({"a": ("float32", (2,))}, len(data))
