"""What a recording is as a file, and what is said of files that are something else."""

import json
import re

import pytest
from recordings import recorded

from hybridpp.errors import ConfigError
from hybridpp.report import Recording, find_recording, load_recording


def test_a_saved_recording_is_loaded_as_it_was(tmp_path):
    recording = recorded(dp_size=2, tp_size=2, num_steps=2)
    assert recording.save(tmp_path / "new" / "run") == tmp_path / "new" / "run" / "recording.json"
    assert load_recording(tmp_path / "new" / "run") == recording
    assert recording.save(tmp_path / "other.json") == tmp_path / "other.json"
    assert load_recording(str(tmp_path / "other.json")) == recording
    assert [path.name for path in (tmp_path / "new" / "run").iterdir()] == ["recording.json"], "no unfinished file"


def test_a_recording_replaces_an_older_one_and_a_failure_leaves_it(tmp_path, monkeypatch):
    recorded(num_steps=2).save(tmp_path)
    recorded(num_steps=3).save(tmp_path)
    assert load_recording(tmp_path).num_steps == 3
    monkeypatch.setattr(Recording, "to_json", lambda self: "\ud800")  # which no file can hold
    with pytest.raises(UnicodeEncodeError):
        recorded(num_steps=4).save(tmp_path)
    assert load_recording(tmp_path).num_steps == 3
    assert [path.name for path in tmp_path.iterdir()] == ["recording.json"]


def test_pipelines_are_the_ranks_that_pass_on_to_each_other():
    recording = recorded(num_ranks=2, dp_size=2, tp_size=2)
    pipelines = {key: [rank.rank for rank in ranks] for key, ranks in recording.pipelines().items()}
    assert pipelines == {(0, 0): [0, 2], (0, 1): [1, 3], (1, 0): [4, 6], (1, 1): [5, 7]}
    assert recording.timeline(dp=1, tp=1).num_ranks == 2
    assert recording.all_ranks().num_ranks == 8


def test_names_of_newer_releases_of_this_version_are_left_out():
    content = json.loads(recorded().to_json())
    content["ranks"][0]["temperature"] = 80
    content["weather"] = "rain"
    assert Recording.from_json(json.dumps(content)) == recorded()


def damaged(change):
    content = json.loads(recorded().to_json())
    change(content)
    return json.dumps(content)


def without_steps(content):
    content["ranks"][0]["actions"][0][0] = "first"


def without_times(content):
    content["ranks"][0]["actions"][0][4] = None


def without_a_rank(content):
    del content["ranks"][0]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "the text is no recording: it is no JSON"),
        ("[1]", "the text is no recording: it is other JSON. Give a recording.json"),
        ('{"spans": []}', "it is a timeline alone. Give a recording.json"),
        (damaged(lambda content: content.update(version=2)), "of version 2, and this hybridpp reads versions up to 1."),
        (damaged(lambda content: content.update(version=None)), "is a recording of version None"),
        (damaged(lambda content: content.pop("stages")), "the text is a damaged recording: KeyError: 'stages'."),
        (damaged(without_steps), "is a damaged recording: TypeError: step must be an integer: got 'first'."),
        (damaged(without_times), "is a damaged recording: TypeError: ready_ms must be a number: got None."),
        (damaged(without_a_rank), "ValueError: the ranks must be numbered from 0: got [1]. Record the step again."),
        (damaged(lambda content: content.update(ranks=[])), "the ranks must be numbered from 0: got []."),
    ],
)
def test_other_files_are_refused_with_what_they_are(text, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        Recording.from_json(text)


def test_paths_without_a_recording_are_refused_with_what_to_give(tmp_path):
    with pytest.raises(ConfigError, match=r"there is no '.*nowhere'\. Give the folder or file"):
        find_recording(tmp_path / "nowhere")
    with pytest.raises(ConfigError, match=r"has no recording\.json\. Record a step with `booster\.record_timeline"):
        find_recording(tmp_path)
    (tmp_path / "recording.json").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="is no recording: it is not a text file"):
        load_recording(tmp_path)
