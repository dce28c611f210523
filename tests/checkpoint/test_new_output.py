"""What a conversion writes is there completely or not at all."""

import pytest

from hybridpp.checkpoint.new_output import new_output
from hybridpp.errors import CheckpointError


def killed(path):
    with new_output(path) as temporary:
        temporary.mkdir()
        (temporary / "x").write_text("half")
        assert temporary.name.startswith(f".{path.name}.hybridpp-")
        raise KeyboardInterrupt


def test_what_is_interrupted_leaves_nothing(tmp_path):
    with pytest.raises(KeyboardInterrupt):
        killed(tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_files_and_folders_appear_at_the_end(tmp_path):
    with new_output(tmp_path / "new" / "file") as temporary:
        temporary.write_text("all")
        assert not (tmp_path / "new" / "file").exists()
    with new_output(tmp_path / "folder") as temporary:
        temporary.mkdir()
        (temporary / "x").write_text("all")
    assert (tmp_path / "new" / "file").read_text() == (tmp_path / "folder" / "x").read_text() == "all"


def test_what_appears_meanwhile_is_not_overwritten(tmp_path):
    def write():
        with new_output(tmp_path / "out") as temporary:
            temporary.write_text("ours")
            (tmp_path / "out").write_text("theirs")

    with pytest.raises(CheckpointError, match=r"out exists, and is not overwritten. Remove it, or pass another path"):
        write()
    assert [path.read_text() for path in tmp_path.iterdir()] == ["theirs"]
