"""Arguments of saves."""

import re
from pathlib import Path

import numpy
import pytest

from hybridpp.errors import ConfigError
from hybridpp.saving import check_run_arguments, check_save_arguments, file_bytes_of, is_file_name, with_prefix

DEFAULTS = {
    "shard": True,
    "size_per_shard": 1024,
    "use_safetensors": None,
    "gather_dtensor": True,
}


@pytest.mark.parametrize(
    ("name", "is_file"),
    [("model.safetensors", True), ("model.pt", True), ("model.bin", True), ("model", False), ("vit.v2", False)],
)
def test_only_a_suffix_of_weights_names_a_file(name, is_file):
    assert is_file_name(Path("runs") / name) == is_file


@pytest.mark.parametrize(("name", "safe"), [("folder", True), ("a.safetensors", True), ("a.pt", False)])
def test_the_format_must_be_that_of_the_path(tmp_path, name, safe):
    check_save_arguments(tmp_path / name, **{**DEFAULTS, "use_safetensors": safe})
    with pytest.raises(ConfigError, match=f"^use_safetensors={not safe} does not fit the path: "):
        check_save_arguments(tmp_path / name, **{**DEFAULTS, "use_safetensors": not safe})


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"size_per_shard": 0}, "size_per_shard must be a number of MB above 0: got 0."),
        ({"size_per_shard": True}, "size_per_shard must be a number of MB above 0: got True."),
        ({"gather_dtensor": False}, "gather_dtensor=False is not supported"),
        ({"shard": 1}, "shard must be True or False: got shard=1."),
    ],
)
def test_an_unsupported_argument_is_refused_by_name(given, text):
    with pytest.raises(ConfigError, match=f"^{re.escape(text)}"):
        check_save_arguments(Path("folder"), **{**DEFAULTS, **given})


@pytest.mark.parametrize("keep_last", [None, 1, 10])
def test_right_arguments_of_a_run(keep_last):
    check_run_arguments(0, keep_last)


@pytest.mark.parametrize(
    ("step", "keep_last", "text"),
    [
        (-1, None, "step must be a number of steps, 0 or more: got -1. Count the run's steps."),
        (True, None, "step must be a number of steps, 0 or more: got True."),
        (1, 0, "keep_last must be a number of checkpoints, 1 or more: got 0. Leave it out to keep all."),
        (1, True, "keep_last must be a number of checkpoints, 1 or more: got True."),
    ],
)
def test_wrong_arguments_of_a_run(step, keep_last, text):
    with pytest.raises(ConfigError, match=f"^{re.escape(text)}"):
        check_run_arguments(step, keep_last)


@pytest.mark.parametrize("step", [numpy.int64(3), 3])
def test_steps_and_extras_of_a_run(step):
    check_run_arguments(step, None, {"best": 0.9})
    with pytest.raises(ConfigError, match=r"^extras must be a dict: got \[1\]\. Give each value a name"):
        check_run_arguments(step, None, [1])


@pytest.mark.parametrize("path", [None, b"run", "", 3])
def test_what_is_no_path_is_refused(path):
    with pytest.raises(ConfigError, match=re.escape(f"a path is a text or a pathlib.Path: got {path!r}.")):
        with_prefix(path, None)


def test_a_prefix_is_the_name_of_a_folder(tmp_path):
    assert with_prefix("run", None) == with_prefix("run", "") == Path("run")
    assert with_prefix("run", "ema") == Path("run/ema")
    for prefix in ("..", "a/b", "/a", 1):
        with pytest.raises(ConfigError, match="prefix must be the name of a folder to make in the path: got"):
            with_prefix("run", prefix)
    with pytest.raises(ConfigError, match=r"prefix='ema' names a folder, and run\.pt ends as a file does"):
        with_prefix("run.pt", "ema")
    (tmp_path / "run.pt").mkdir()
    assert with_prefix(tmp_path / "run.pt", "ema").name == "ema"


def test_the_limit_of_a_file_in_bytes():
    assert (file_bytes_of(2), file_bytes_of(0.0000001)) == (2_000_000, 1)
    assert file_bytes_of(None) > 2**60
