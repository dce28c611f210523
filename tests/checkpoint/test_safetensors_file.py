"""Files that are written tensor by tensor are those that safetensors reads."""

import re

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from hybridpp.checkpoint.safetensors_file import StoredSpec, write_safetensors
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
