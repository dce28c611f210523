import json
import os
import re
import subprocess
import sys
import time

import pytest

from hybridpp.cluster import launcher_notes
from hybridpp.cluster.launcher_notes import LauncherNotes, any_launched, has_begun, has_launched, markers, num_ended
from hybridpp.cluster.rank_process import RankProcess
from hybridpp.errors import CheckpointError


def test_the_launcher_reads_what_ranks_leave(tmp_path):
    assert (has_begun(tmp_path), num_ended(tmp_path), markers(tmp_path)) == (False, 0, [])
    first, second = LauncherNotes(tmp_path, 0), LauncherNotes(tmp_path, 1)
    second.step_done()
    assert has_begun(tmp_path)
    for rank in (first, second):
        rank.will_mark("/run/interrupted.json")
        rank.ended()
    assert (num_ended(tmp_path), markers(tmp_path)) == (2, ["/run/interrupted.json"])
    first.clear(), second.clear()
    assert not list(tmp_path.iterdir())


def test_a_rank_is_known_to_have_launched_by_its_group_of_processes(tmp_path):
    assert not any_launched(tmp_path)
    LauncherNotes(tmp_path, 3).launched()
    LauncherNotes().launched()
    assert any_launched(tmp_path)
    assert has_launched(tmp_path, os.getpgrp())
    assert not has_launched(tmp_path, os.getpgrp() + 1)


def test_without_a_launcher_or_after_its_end_there_are_no_notes(tmp_path):
    for notes in (LauncherNotes(), LauncherNotes(tmp_path / "gone", 0)):
        notes.clear(), notes.step_done(), notes.ended(), notes.will_mark("x")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("launcher", "lasts_s"), [("ended", 1.0), ("ended", 60.0), ("runs", 60.0)])
def test_a_run_whose_launcher_was_killed_is_waited_for(tmp_path, monkeypatch, caplog, launcher, lasts_s):
    monkeypatch.setattr(launcher_notes, "_PATIENCE_S", 5.0)
    (run := tmp_path / "run").mkdir()
    process = RankProcess.own() if launcher == "runs" else RankProcess.own()._replace(pid=2**22 + 1)
    code = f"import os, time; os.open({str(run)!r}, os.O_RDONLY); print('open', flush=True); time.sleep({lasts_s})"
    variables = os.environ | {"HYBRIDPP_LAUNCHER": json.dumps(process)}
    with subprocess.Popen([sys.executable, "-c", code], env=variables, stdout=subprocess.PIPE) as old:
        old.stdout.readline()
        notes = LauncherNotes(tmp_path)
        notes.use(tmp_path / "not there")
        start = time.monotonic()
        if launcher == "ended" and lasts_s > 5:
            with pytest.raises(CheckpointError, match=re.escape(f"(kill {old.pid}), or pass another path.")):
                notes.use(run)
        else:
            notes.use(run)
            if launcher == "runs":
                assert old.poll() is None
            else:
                old.wait(0.5)  # its files are closed before it has ended
            assert time.monotonic() - start < 5
            notes.use(run)
        assert len(caplog.messages) == (launcher == "ended")
        old.kill()
    for descriptor in notes._held.values():
        os.close(descriptor)
