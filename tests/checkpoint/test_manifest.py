"""A manifest is input: what it names is checked before a file is opened or memory is allocated."""

import copy
import json
import os
import re

import pytest
import torch
from checkpoint_folders import full_holding, save, tensors_of

from hybridpp.checkpoint.boxes import Box
from hybridpp.checkpoint.commit import step_folder
from hybridpp.checkpoint.digest import new_digest, written_as
from hybridpp.checkpoint.manifest import MANIFEST, Chunk, _are_all_of, merged, parse, tensor_as_json
from hybridpp.checkpoint.reader import read_manifest
from hybridpp.errors import CheckpointError


def signed(content):
    """A manifest with a digest that fits, whatever is in it."""
    return signed_text(json.dumps(content))


def signed_text(text):
    rest = text.encode()[1:] + b"\n"
    digest = new_digest()
    digest.update(rest)
    return f'{{"digest": "{written_as(digest)}",\n'.encode() + rest


def content_of(manifest):
    content = json.loads(manifest.to_bytes())
    del content["digest"]
    return content


def test_it_comes_back_and_is_json(tmp_path):
    manifest = save(tmp_path, 3)
    data = (step_folder(tmp_path, 3) / MANIFEST).read_bytes()
    assert parse(data) == manifest == parse(signed(content_of(manifest)))
    assert json.loads(data)["step"] == 3
    assert len(manifest.files) == 2
    assert manifest.nbytes > 3 * 96


def test_every_flipped_bit_is_found(tmp_path):
    data = save(tmp_path, 3).to_bytes()
    for position in range(0, len(data), 7):
        for bit in range(8):
            flipped = bytearray(data)
            flipped[position] ^= 1 << bit
            with pytest.raises(CheckpointError):
                parse(bytes(flipped))
    with pytest.raises(CheckpointError, match=f"{MANIFEST} is damaged"):
        parse(data[:-2])
    with pytest.raises(CheckpointError, match=f"{MANIFEST} is damaged"):
        parse(b"")


def first(content, part):
    return next(iter(content[part].values()))


def rename_file(content, name):
    old = next(iter(content["files"]))
    content["files"] = {name if key == old else key: entry for key, entry in content["files"].items()}
    for entry in content["tensors"].values():
        entry["chunks"] = [[*chunk[:2], name if chunk[2] == old else chunk[2], chunk[3]] for chunk in entry["chunks"]]


NAMES = [
    "../rank-00000.01234567.00000.safetensors",
    "/etc/rank-00000.01234567.00000.safetensors",
    "a/rank-00000.01234567.00000.safetensors",
    "rank-00000.01234567.00000.safetensors\n",
    "..",
    "",
    "weights.pt",
]
ATTACKS = {
    **{f"name {name!r}": (lambda c, n=name: rename_file(c, n), "must be the name of a data file") for name in NAMES},
    "huge shape": (lambda c: first(c, "tensors").update(shape=[2**50, 4]), "parts of .* are missing"),
    "huge tensor": (
        lambda c: first(c, "tensors").update(
            shape=[2**50], chunks=[[[0], [2**50], *first(c, "tensors")["chunks"][0][2:]]]
        ),
        "is too small for what it holds",
    ),
    "outside": (lambda c: first(c, "tensors")["chunks"][0].__setitem__(0, [5, 0]), "does not lie in its shape"),
    "negative": (
        lambda c: first(c, "tensors")["chunks"][0].__setitem__(0, [-1, 0]),
        "its start.0. is -1, and must be a whole number from 0",
    ),
    "bool": (
        lambda c: first(c, "tensors")["chunks"][0].__setitem__(0, [True, 0]),
        "its start.0. is True, and must be a whole number",
    ),
    "overlap": (lambda c: first(c, "tensors")["chunks"][0].__setitem__(0, [0, 1]), "parts of .* overlap"),
    "missing": (lambda c: first(c, "tensors")["chunks"].pop(), "parts of .* are missing"),
    "twice": (
        lambda c: first(c, "tensors")["chunks"][1].__setitem__(slice(2, 4), first(c, "tensors")["chunks"][0][2:]),
        "is listed twice",
    ),
    "other file": (
        lambda c: first(c, "tensors")["chunks"][0].__setitem__(2, "rank-00007.01234567.00000.safetensors"),
        "is in a file that is not listed",
    ),
    "dtype": (
        lambda c: first(c, "tensors").update(dtype="object"),
        "dtype is 'object', and must be one of bfloat16, bool",
    ),
    "small file": (lambda c: first(c, "files").update(bytes=80), "is too small for what it holds"),
    "id": (lambda c: c.update(save_id="../../x"), "save_id is '../../x', and must be eight hexadecimal digits"),
    "step": (lambda c: c.update(step="3"), "step is '3', and must be a whole number from 0"),
    "format": (
        lambda c: c.update(format=99),
        "a newer version of hybridpp wrote it, in format 99, and this one reads format 1. Install",
    ),
    "no tensors": (lambda c: c.pop("tensors"), "it lacks 'tensors'"),
    "list": (lambda c: c.update(files=[]), "files is .., and must be an object"),
    "chunk of another": (
        lambda c: first(c, "tensors")["chunks"][0].__setitem__(3, "weights/1#0"),
        "'weights/1#0' is no name of a part of 'weights/0'",
    ),
    "2**63": (
        lambda c: first(c, "tensors")["chunks"][0].__setitem__(0, [2**63, 0]),
        "its start.0. is 9223372036854775808, and must be a whole number from 0 to 9223372036854775807",
    ),
    "empty but huge": (
        lambda c: first(c, "tensors").update(shape=[0, 2**40, 2**40], chunks=[]),
        "must be one of at most 9223372036854775807 bytes",
    ),
    "dimensions": (
        lambda c: first(c, "tensors").update(shape=[1] * 65, chunks=[]),
        "must be a list of at most 64",
    ),
    "digest": (lambda c: first(c, "files").update(digest=["a"]), "digest is .'a'., and must be a digest"),
    "layout": (lambda c: c.update(layout={"dp_size": -1}), "layout.dp_size is -1, and must be a whole number from 1"),
    "nesting": (lambda c: c.update(state=[]), "state is .., and must be an object"),
}


@pytest.mark.parametrize("attack", ATTACKS)
def test_a_manifest_with_a_right_digest_and_wrong_contents_is_refused(tmp_path, attack):
    content = copy.deepcopy(content_of(save(tmp_path, 3)))
    change, text = ATTACKS[attack]
    change(content)
    with pytest.raises(CheckpointError, match=text):
        parse(signed(content))


def test_wrong_sizes_and_links_are_refused_before_a_file_is_opened(tmp_path):
    manifest, folder = save(tmp_path, 3), step_folder(tmp_path, 3)
    name = next(iter(manifest.files))
    data = (folder / name).read_bytes()
    (folder / name).write_bytes(data + b"0")
    with pytest.raises(CheckpointError, match=f"{name} has {len(data) + 1} bytes, and was written with {len(data)}"):
        read_manifest(folder)
    (folder / name).unlink()
    with pytest.raises(CheckpointError, match=f"{name} is missing"):
        read_manifest(folder)
    (tmp_path / "elsewhere").write_bytes(data)
    (folder / name).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(CheckpointError, match=f"{name} is a link, and not the file that was written"):
        read_manifest(folder)


def test_what_ranks_wrote_is_merged_and_must_agree(tmp_path):
    (_, tensor), *_ = tensors_of(0).items()
    entry = save(tmp_path, 1, holdings=[full_holding("x", tensor)]).tensors["x"]
    raw = tensor_as_json(entry)
    both = merged([("x", raw), ("x", raw), ("y", raw)])
    assert both["y"] == entry
    assert len(both["x"].chunks) == 2
    assert isinstance(both["x"].chunks[0], Chunk)
    assert both["x"].chunks[0].box == Box((0, 0), (6, 4))
    with pytest.raises(CheckpointError, match=re.escape("ranks disagree about 'x'")):
        merged([("x", raw), ("x", {**raw, "dtype": "float16"})])
    assert torch.float16.itemsize * 24 == merged([("x", {**raw, "dtype": "float16"})])["x"].nbytes


def test_an_element_that_is_in_two_boxes_while_another_is_in_none_is_found():
    whole = [Box((0, 0), (3, 2)), Box((3, 0), (3, 2)), Box((0, 2), (6, 2))]
    assert _are_all_of(whole, (6, 4))
    assert _are_all_of([Box((), ())], ())
    assert _are_all_of([], (0, 5))
    for shifted in ([Box((0, 0), (3, 2)), Box((2, 0), (3, 2)), Box((0, 2), (6, 2))], [whole[0], whole[0], whole[2]]):
        assert sum(box.size for box in shifted) == 24
        assert not _are_all_of(shifted, (6, 4))


@pytest.mark.timeout(60)
def test_very_many_parts_are_checked_in_linear_time():
    """All begin in the first row, so that each two could overlap."""
    number = 100_000
    assert _are_all_of([Box((0, column), (2, 1)) for column in range(number)], (2, number))


def test_what_is_too_large_or_no_strict_json_is_not_used(tmp_path, monkeypatch):
    data = save(tmp_path, 3).to_bytes()
    path = step_folder(tmp_path, 3) / MANIFEST
    for old, new, text in (
        (b'"step": 3', b'"step": 3, "step": 3', "the key 'step' is there twice"),
        (b'"step": 3', b'"step": NaN', "NaN is there, which is no number of JSON"),
        (b'"step": 3', b'"step": ' + b"[" * 100_000, "it is nested too deep"),
    ):
        path.write_bytes(signed_text((b"{" + data.partition(b"\n")[2].replace(old, new)).decode()))
        with pytest.raises(CheckpointError, match=text):
            read_manifest(path.parent)
    with path.open("wb") as file:
        file.truncate(2**30)
    monkeypatch.setattr(type(path), "read_bytes", None)
    with pytest.raises(CheckpointError, match=r"it has 1073741824 bytes, and at most 512\.00 MiB of one are read"):
        read_manifest(path.parent)
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(CheckpointError, match=f"{MANIFEST} cannot be read: No such file"):
        read_manifest(path.parent)
