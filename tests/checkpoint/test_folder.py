"""What a folder of weights may hold beside what is saved or loaded, and single files."""

import json
import os
import re
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from saved import NEW, OLD, SIZES, VIT_SIZES, by_transformers, by_us, filled, leave_pickled, plain_model, save, vit
from torch import nn
from transformers.utils import logging

from hybridpp.checkpoint import SaveTarget, open_folder
from hybridpp.errors import CheckpointError


def names(folder):
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.covering
@pytest.mark.parametrize("new", VIT_SIZES)
@pytest.mark.parametrize("old", [*VIT_SIZES, "bin", "bins", "by transformers"])
def test_a_save_leaves_no_older_weights_and_everything_else(tmp_path, old, new):
    if old == "bin":
        leave_pickled(vit(), tmp_path, OLD)
    elif old == "bins":
        vit().config.save_pretrained(tmp_path)
        state = filled(vit(), OLD)
        files = [f"pytorch_model-0000{n}-of-00002.bin" for n in (1, 2)]
        torch.save({name: state[name] for name in list(state)[:5]}, tmp_path / files[0])
        torch.save({name: state[name] for name in list(state)[5:]}, tmp_path / files[1])
        index = {"metadata": {}, "weight_map": {name: files[n >= 5] for n, name in enumerate(state)}}
        (tmp_path / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    elif old == "by transformers":  # which leaves all of them
        vit().save_pretrained(tmp_path)
        vit().save_pretrained(tmp_path, max_shard_size=VIT_SIZES["three"])
    else:
        save(vit(), tmp_path, OLD, VIT_SIZES[old])
    others = ["README.md", "preprocessor_config.json", "tokenizer.json", "model.fp16.safetensors", "model-notes.txt"]
    for name in others:
        (tmp_path / name).write_text("mine")
    (tmp_path / "logs").mkdir()
    save(vit(), tmp_path, NEW, VIT_SIZES[new])
    assert by_us(vit(), tmp_path) == NEW
    assert by_transformers(tmp_path) == (NEW, 3)
    rest = set(names(tmp_path)) - {*others, "logs", "config.json"}
    assert all((tmp_path / name).read_text() == "mine" for name in others)
    if new == "one":
        assert rest == {"model.safetensors"}
    else:
        index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
        assert rest == {"model.safetensors.index.json", *index["weight_map"].values()}


def test_the_names_of_a_first_save_are_the_usual_ones(tmp_path):
    save(plain_model(), tmp_path, NEW, SIZES["two"])
    files = [f"model-0000{n}-of-00002.safetensors" for n in (1, 2)]
    assert names(tmp_path) == [*files, "model.safetensors.index.json"]


def test_an_index_beside_a_file_of_other_weights_is_refused(tmp_path):
    save(vit(), tmp_path, OLD, VIT_SIZES["two"])
    save(vit(), tmp_path / "other", NEW)
    shutil.copy(tmp_path / "other" / "model.safetensors", tmp_path)
    text = r"holds two models: model.safetensors, written .*, which from_pretrained reads, and what model.safetensors"
    for model in (vit(), plain_model()):
        with pytest.raises(CheckpointError, match=text + r".index.json, written .*, names. Remove the outdated"):
            open_folder(model, tmp_path, strict=False)
    next(tmp_path.glob("model-00001*")).unlink()
    with pytest.raises(CheckpointError, match=text):
        open_folder(vit(), tmp_path, strict=True)
    next(tmp_path.glob("model-00002*")).unlink()  # as transformers leaves it
    assert by_us(vit(), tmp_path) == NEW


def test_an_index_beside_a_file_of_the_same_weights_is_left_alone(tmp_path):
    save(vit(), tmp_path, OLD, VIT_SIZES["two"])
    save(vit(), tmp_path / "other", OLD)
    shutil.copy(tmp_path / "other" / "model.safetensors", tmp_path)
    assert by_us(vit(), tmp_path) == OLD


def test_an_adapter_in_the_folder_is_not_put_on_top_of_what_is_saved(tmp_path):
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"holds an adapter \(adapter_config.json\).* move the adapter away"):
        SaveTarget(tmp_path, vit())
    assert names(tmp_path) == ["adapter_config.json"]


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(5, 4)
        self.head = nn.Linear(4, 5, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("scale", torch.ones(1))
        self.register_buffer("same", self.scale)


@pytest.mark.parametrize("name", ["x.safetensors", "x.pt", "x.pth", "x.bin", "folder"])
def test_plain_torch_reads_every_name_of_a_tied_weight(tmp_path, name):
    model, path = Tied(), tmp_path / name
    state = {name: tensor.detach() for name, tensor in model.state_dict().items()}
    for _ in range(2):  # the second over the first
        SaveTarget(path, model).write(dict(state), torch.float32, "1GB")
    assert names(tmp_path) == [name]
    file = path / "model.safetensors" if name == "folder" else path
    loaded = load_file(file) if file.suffix == ".safetensors" else torch.load(file, weights_only=True)
    fresh = Tied()
    fresh.load_state_dict(loaded, strict=True)
    assert torch.equal(fresh.head.weight, model.head.weight)
    contents = open_folder(model, path, strict=True)
    assert {name: stored.full().shape for name, stored in contents.read(list(state))} == contents.shapes


def test_a_killed_save_keeps_the_old_file_and_leaves_no_temporary_files(tmp_path, monkeypatch):
    model, path = Tied(), tmp_path / "x.pt"
    state = model.state_dict()
    SaveTarget(path, model).write(dict(state), None, "1GB")
    old = path.read_bytes()
    SaveTarget(path, model)  # and killed
    assert len(names(tmp_path)) == 2
    replace = os.replace

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    text = r"x.pt cannot be written: No space left on device. Free disk space, check permissions"
    with pytest.raises(CheckpointError, match=text):
        SaveTarget(path, model).write({}, None, "1GB")
    monkeypatch.setattr(os, "replace", replace)
    assert names(tmp_path) == ["x.pt"]
    assert path.read_bytes() == old


def test_files_that_hold_no_state_dict_are_refused(tmp_path):
    path = tmp_path / "x.pt"
    for found, text in [
        ({"model": {}, "step": 3}, r"x.pt holds no state dict, but a dict with \['model', 'step'\]. Save model.state"),
        ([torch.ones(1)], "x.pt holds no state dict, but a list."),
        (nn.Linear(1, 1), "x.pt cannot be read as a file of weights: UnpicklingError"),
    ]:
        torch.save(found, path)
        with pytest.raises(CheckpointError, match=text):
            open_folder(plain_model(), path, strict=True)
    path.write_bytes(b"\x80\x02x")
    with pytest.raises(CheckpointError, match=r"x.pt cannot be read as a file of weights"):
        open_folder(plain_model(), path, strict=True)


def test_what_several_files_hold_without_an_index_is_refused(tmp_path):
    save_file({"0.weight": torch.ones(1)}, tmp_path / "a.safetensors")
    save_file({"0.weight": torch.zeros(1)}, tmp_path / "b.safetensors")
    with pytest.raises(CheckpointError, match=r"holds '0.weight' in a.safetensors and in b.safetensors, and no model"):
        open_folder(plain_model(), tmp_path, strict=True)


@pytest.mark.parametrize("model", [vit(), plain_model()], ids=["vit", "plain"])
@pytest.mark.parametrize(
    "index",
    [
        "",
        "[]",
        "{}",
        '{"weight_map": []}',
        '{"weight_map": {"a": 3}}',
        '{"weight_map": {"a": "../a.safetensors"}}',
        '{"weight_map": {"a": "/a.safetensors"}}',
        '{"weight_map": {"a": ""}}',
        '{"weight_map": {"a": "gone.safetensors"}}',
        '{"weight_map": {"a": "there.safetensors"}}',
    ],
)
def test_whatever_is_wrong_with_an_index_is_one_kind_of_error(tmp_path, model, index):
    save_file({"b": torch.ones(1)}, tmp_path / "there.safetensors")
    vit().config.save_pretrained(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text(index)
    with pytest.raises(CheckpointError, match=re.escape(str(tmp_path))):
        open_folder(model, tmp_path, strict=True)


@pytest.mark.parametrize("broken", [b"", b"\x80\x02", b"PK\x03\x04 and more", b"no pickle"])
def test_a_broken_pickle_in_a_folder_is_named(tmp_path, broken):
    vit().config.save_pretrained(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(broken)
    with pytest.raises(
        CheckpointError, match=r"(?s)does not hold weights for ViTForImageClassification: .* Pass a folder"
    ):
        by_us(vit(), tmp_path)


def test_a_folder_that_cannot_be_made_is_an_error_with_a_way_out(tmp_path):
    (tmp_path / "file").write_text("here")
    with pytest.raises(CheckpointError, match=r"file/folder cannot be written: Not a directory. Free disk space"):
        SaveTarget(tmp_path / "file" / "folder", vit())
    with pytest.raises(CheckpointError, match=r"file is a file. Pass another path, or one that ends with .safetensors"):
        SaveTarget(tmp_path / "file", vit())
    with pytest.raises(CheckpointError, match=r"x.pt cannot be written: File exists"):
        SaveTarget(tmp_path / "file" / "x.pt", vit())


def test_files_of_old_versions_of_torch_are_read(tmp_path):
    model = plain_model()
    torch.save(filled(model, OLD), tmp_path / "x.pt", _use_new_zipfile_serialization=False)
    assert by_us(model, tmp_path / "x.pt") == OLD


def test_passes_without_weights_show_no_progress(tmp_path, capfd):
    """On every rank there would be a bar of them."""
    logging.enable_progress_bar()
    save(vit(), tmp_path, NEW)
    assert by_us(vit(), tmp_path) == NEW
    assert capfd.readouterr() == ("", "")
    assert logging.is_progress_bar_enabled()


def unfinished_note(folder, **content):
    note = folder / ".hybridpp-save-00000000" / "unfinished.json"
    note.parent.mkdir()
    note.write_text(json.dumps(content))


def index_through_a_link(folder):
    other = folder.parent / "elsewhere"
    (folder / "sub").symlink_to(other)
    shutil.copy(folder / "model.safetensors", other / "model.safetensors")
    names = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    found = {"metadata": {"total_size": 1}, "weight_map": dict.fromkeys(names, "sub/model.safetensors")}
    (folder / "model.safetensors.index.json").write_text(json.dumps(found))


@pytest.mark.parametrize(
    "plant",
    [
        lambda folder: unfinished_note(folder, stale=[], files=["../elsewhere/kept", "sub/kept", "notes.txt"]),
        lambda folder: unfinished_note(folder, stale=[], files=[str(folder.parent / "elsewhere/kept")]),
        lambda folder: unfinished_note(folder, stale=[], files=["model.safetensors", "config.json", "."]),
        lambda folder: unfinished_note(folder, stale=[], files=["model-00000000.safetensors/../../elsewhere/kept"]),
        lambda folder: (folder / ".hybridpp-save-00000000").write_text("x"),
        lambda folder: (folder / ".hybridpp-save-00000000").symlink_to(folder.parent / "elsewhere"),
        lambda folder: (folder / "model-00000000.safetensors").symlink_to(folder.parent / "elsewhere" / "kept"),
        lambda folder: (
            unfinished_note(folder, stale=[], files=[]),
            (folder / ".hybridpp-save-00000000" / "unfinished.json").write_text("[" * 100000),
        ),
        index_through_a_link,
    ],
)
def test_what_a_folder_holds_decides_nothing_outside_of_it(tmp_path, plant):
    folder, elsewhere, model = tmp_path / "folder", tmp_path / "elsewhere", nn.Linear(2, 2)
    elsewhere.mkdir()
    (elsewhere / "kept").write_text("mine")
    save(model, folder, OLD)
    for name in ("config.json", "notes.txt"):
        (folder / name).write_text("{}")
    plant(folder)
    if plant is index_through_a_link:
        with pytest.raises(CheckpointError, match=r"'sub/model\.safetensors' is in 'sub', which is a link to"):
            open_folder(model, folder, strict=True)
    else:
        open_folder(model, folder, strict=True)
    before = {path.name for path in elsewhere.iterdir()}
    save(model, folder, NEW)
    assert {path.name for path in elsewhere.iterdir()} == before
    assert (elsewhere / "kept").read_text() == "mine"
    assert by_us(model, folder) == NEW
    assert {path.name for path in folder.iterdir()} - {"sub"} == {"config.json", "notes.txt", "model.safetensors"}


def test_a_link_whose_target_is_not_there_is_named(tmp_path):
    (tmp_path / "disk").symlink_to(tmp_path / "mounted")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "model.safetensors").symlink_to(tmp_path / "mounted")
    is_a_link = "is a link to .*mounted, which does not exist"
    for path in (tmp_path / "disk", tmp_path / "disk" / "run", tmp_path / "disk" / "model.safetensors"):
        with pytest.raises(CheckpointError, match=rf"^there is no folder or file .*: .*disk {is_a_link}"):
            open_folder(nn.Linear(2, 2), path, strict=True)
    with pytest.raises(
        CheckpointError, match=rf"cannot be read as a safetensors file: .*model\.safetensors {is_a_link}"
    ):
        open_folder(nn.Linear(2, 2), tmp_path / "folder", strict=True)


def snapshot_of_a_cache(path):
    """A folder as the cache of Hugging Face's hub has it: names that are links to files elsewhere."""
    save(vit(), path / "plain", OLD, VIT_SIZES["two"])
    (path / "blobs").mkdir()
    snapshot = path / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    for file in (path / "plain").iterdir():
        file.rename(path / "blobs" / file.name)
        (snapshot / file.name).symlink_to(f"../../blobs/{file.name}")
    return snapshot


def test_a_snapshot_of_links_is_read_and_a_save_replaces_its_links_only(tmp_path):
    snapshot = snapshot_of_a_cache(tmp_path)
    blobs = {file: file.read_bytes() for file in (tmp_path / "blobs").iterdir()}
    assert by_us(vit(), snapshot) == OLD
    save(vit(), snapshot, NEW)
    assert by_us(vit(), snapshot) == NEW
    assert by_transformers(snapshot)[0] == NEW
    assert blobs == {file: file.read_bytes() for file in (tmp_path / "blobs").iterdir()}
    assert not any(file.is_symlink() for file in snapshot.iterdir() if file.suffix in (".safetensors", ".json"))


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ('{"weight_map": {"a": "x", "a": "y"}}', "the key 'a' is there twice"),
        ('{"weight_map": {"a": 3}}', "weight_map['a'] is 3, and must be text"),
        ('{"weight_map": []}', "weight_map is [], and must be an object"),
        ("[" * 100_000, "it is nested too deep"),
        ('{"weight_map": {"a": "../x.safetensors"}}', "'../x.safetensors' is not inside the folder"),
        (r'{"weight_map": {"a": "\ud800.safetensors"}}', "is no name of a file"),
    ],
)
def test_an_index_is_checked_as_a_whole(tmp_path, content, text):
    (tmp_path / "model.safetensors.index.json").write_text(content)
    with pytest.raises(CheckpointError, match=re.escape(text)):
        open_folder(nn.Linear(2, 2), tmp_path, strict=True)


def test_a_configuration_of_more_layers_than_any_model_has_is_refused(tmp_path):
    save(vit(), tmp_path, OLD)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 2**31}))
    text = "num_hidden_layers = 2147483648, and no model has more than 2000 layers. Restore it from a copy."
    with pytest.raises(CheckpointError, match=re.escape(text)):
        open_folder(vit(), tmp_path, strict=True)


def test_a_named_pipe_is_no_file_of_weights(tmp_path):
    os.mkfifo(tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"model\.safetensors is no regular file\. Copy it again"):
        open_folder(nn.Linear(2, 2), tmp_path, strict=True)
