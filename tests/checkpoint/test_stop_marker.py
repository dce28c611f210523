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


def test_it_is_written_through_no_link(tmp_path):
    folder, elsewhere = tmp_path / "run", tmp_path / "elsewhere"
    folder.mkdir()
    elsewhere.write_text("mine")
    (folder / "interrupted.tmp").symlink_to(elsewhere)
    write_marker(folder, 1, signal.SIGTERM)
    assert elsewhere.read_text() == "mine"
    assert not marker_path(folder).is_symlink()
