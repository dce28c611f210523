from hybridpp.cluster.launcher_notes import LauncherNotes, has_begun, markers, num_ended


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


def test_without_a_launcher_or_after_its_end_there_are_no_notes(tmp_path):
    for notes in (LauncherNotes(), LauncherNotes(tmp_path / "gone", 0)):
        notes.clear(), notes.step_done(), notes.ended(), notes.will_mark("x")
    assert not list(tmp_path.iterdir())
