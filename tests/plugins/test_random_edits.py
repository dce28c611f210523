"""Folders that were edited anywhere are refused, or are what their files say."""

import pytest
from plugins.random_edits import results_of


@pytest.mark.timeout(120)
def test_edited_folders_are_refused_or_read_right():
    table, problems, _ = results_of(60, seed=7000, only="run dp2|with a note|file of|import")
    assert problems == []
    assert sum(counts["refused"] for counts in table.values()) > 12
    assert sum(counts["loaded"] for counts in table.values()) > 2
