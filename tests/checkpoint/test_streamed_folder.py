"""A folder is written with one tensor in memory."""

import json
import weakref

import torch
from safetensors.torch import load_file

from hybridpp.checkpoint.hub_tensors import OutputGroup, plain_groups
from hybridpp.checkpoint.safetensors_file import StoredSpec
from hybridpp.checkpoint.streamed_folder import StreamedFolder


def test_one_tensor_is_alive_while_files_are_written_up_to_a_size(tmp_path):
    specs = {f"w{n}": StoredSpec(torch.float32, (100,)) for n in range(5)}
    specs["steps"] = StoredSpec(torch.int64, ())
    folder = StreamedFolder(plain_groups(specs, {"w0 again": "w0"}), "0.9KB")
    alive, most = weakref.WeakSet(), 0

    def read(names):
        nonlocal most
        for name in names:
            tensor = torch.full(specs[name].shape, float(name[1]) if name[0] == "w" else 3).to(specs[name].dtype)
            alive.add(tensor)
            most = max(most, len(alive))
            yield tensor
            del tensor

    for file in folder.files:
        folder.write(tmp_path / file.name, file, read(file.reads))
    folder.write_index(tmp_path)
    assert most <= 2, "that which is written, and the next one"
    assert [file.reads for file in folder.files] == [("w0",), ("w1", "w2"), ("steps", "w3", "w4")]
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == 6 * 400 + 8
    for name, file in index["weight_map"].items():
        value = 3 if name == "steps" else float(name[1])
        assert (load_file(tmp_path / file)[name] == value).all()


def test_what_is_made_together_is_read_once_though_files_divide_it(tmp_path):
    half = StoredSpec(torch.float32, (2,))

    class Split(OutputGroup):
        def made(self, tensors):
            first, second = tensors["ab"].split(2)
            return {"a": first, "b": second}

    folder = StreamedFolder([Split(("ab",), {"a": half, "b": half})], "0.008KB")
    assert [file.reads for file in folder.files] == [("ab",), ()]
    for file, tensors in zip(folder.files, ([torch.arange(4.0)], []), strict=True):
        folder.write(tmp_path / file.name, file, tensors)
    first, second = (load_file(tmp_path / file.name) for file in folder.files)
    assert (list(first), first["a"].tolist()) == (["a"], [0, 1])
    assert (list(second), second["b"].tolist()) == (["b"], [2, 3])
