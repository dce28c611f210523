"""Arguments of `save_model`."""

import re
from pathlib import Path

import pytest

from hybridpp.errors import ConfigError
from hybridpp.saving import check_save_arguments, is_file_name

DEFAULTS = {
    "shard": True,
    "size_per_shard": 1024,
    "use_safetensors": None,
    "prefix": None,
    "gather_dtensor": True,
    "use_async": False,
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
        ({"prefix": "ema"}, "prefix='ema' is not supported"),
        ({"gather_dtensor": False}, "gather_dtensor=False is not supported"),
        ({"use_async": True}, "use_async=True is not supported"),
        ({"shard": 1}, "shard must be True or False: got shard=1."),
    ],
)
def test_an_unsupported_argument_is_refused_by_name(given, text):
    with pytest.raises(ConfigError, match=f"^{re.escape(text)}"):
        check_save_arguments(Path("folder"), **{**DEFAULTS, **given})
