import json
import signal

import pytest

from hybridpp.checkpoint.remote_path import as_path
from hybridpp.checkpoint.stop_marker import marker_path, remove_marker, write_marker


@pytest.fixture(params=["local", "memory"])
def folder(request, tmp_path):
    path = as_path(tmp_path if request.param == "local" else f"memory://{tmp_path.name}/run")
    path.mkdir(parents=True, exist_ok=True)
    return path


def test_it_says_which_signal_stopped_the_run_after_which_step(folder):
    assert not marker_path(folder).exists()
    for step in (3, 4):
        write_marker(folder, step, signal.SIGUSR1)
    assert json.loads(marker_path(folder).read_text()) == {"step": 4, "signal": "SIGUSR1"}
    assert [path.name for path in folder.iterdir()] == ["interrupted.json"]


def test_removing_it_twice_is_no_error(folder):
    write_marker(folder, 1, signal.SIGTERM)
    remove_marker(folder), remove_marker(folder)
    assert not marker_path(folder).exists()


def test_it_replaces_a_link_and_writes_through_none(tmp_path):
    folder, elsewhere = tmp_path / "run", tmp_path / "elsewhere"
    folder.mkdir()
    elsewhere.write_text("mine")
    for name in ("interrupted.json", "interrupted.0123abcd.tmp", "interrupted.tmp"):
        (folder / name).symlink_to(elsewhere)
    write_marker(folder, 1, signal.SIGTERM)
    assert elsewhere.read_text() == "mine"
    assert not marker_path(folder).is_symlink()
    assert sorted(path.name for path in folder.iterdir()) == ["interrupted.json", "interrupted.tmp"]


def test_folders_of_such_names_are_in_no_ones_way(tmp_path):
    for name in ("interrupted.tmp", "interrupted.0123abcd.tmp"):
        (tmp_path / name / "inside").mkdir(parents=True)
    write_marker(tmp_path, 1, signal.SIGTERM)
    assert marker_path(tmp_path).is_file()
    assert (tmp_path / "interrupted.0123abcd.tmp" / "inside").is_dir()


def test_a_link_to_nothing_is_removed(tmp_path):
    marker_path(tmp_path).symlink_to(tmp_path / "nothing")
    remove_marker(tmp_path)
    assert not list(tmp_path.iterdir())
