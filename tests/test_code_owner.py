"""Whose code a file is does not depend on what folders are called."""

import dataclasses
import json
from pathlib import Path

import hybridpp_plugins
import pytest
import torch
import transformers
from support import ROOT

import hybridpp
from hybridpp.cluster.failure_text import failure_text
from hybridpp.code_owner import CodeOwner, code_owner, is_library_module, is_own_module
from hybridpp.config import PipelineConfig
from hybridpp.errors import ConfigError


@pytest.mark.parametrize(
    "path",
    [
        *("hybridpp/train.py", "hybridpp_plugins/train.py", "torch/nn/modules/mine.py", "my torch/transformers/x.py"),
        *("site-packages/mine.py", "lib/python3.12/mine.py", "<frozen/train.py"),
    ],
)
def test_a_script_is_the_users_in_whatever_folder(path, tmp_path, monkeypatch):
    assert code_owner(str(tmp_path / path)) is CodeOwner.USER
    monkeypatch.chdir(tmp_path)
    assert code_owner(f"./{path}") is CodeOwner.USER


@pytest.mark.parametrize("name", ["<stdin>", "<string>", "<ipython-input-3-5ac5>", "<python-input-0>", "train.py"])
def test_what_is_typed_is_the_users(name):
    assert code_owner(name, "<module>") is CodeOwner.USER


def test_files_of_the_clone_are_the_users_but_for_the_packages():
    assert code_owner(str(ROOT / "hybridpp.py")) is CodeOwner.USER
    assert code_owner(str(ROOT / "examples/vit/train.py")) is CodeOwner.USER
    for package in (hybridpp, hybridpp_plugins):
        assert code_owner(package.__file__) is CodeOwner.HYBRIDPP


def test_libraries_are_told_apart():
    assert code_owner(torch.nn.__file__) is CodeOwner.TORCH
    assert code_owner(transformers.__file__) is CodeOwner.PACKAGE
    assert code_owner(json.__file__) is code_owner("<frozen runpy>") is CodeOwner.STANDARD_LIBRARY
    generated = dataclasses.make_dataclass("Made", ["field"]).__init__.__code__
    assert code_owner(generated.co_filename, generated.co_name) is CodeOwner.STANDARD_LIBRARY


def test_a_package_that_is_reached_through_a_link_is_the_same(tmp_path):
    (tmp_path / "link").symlink_to(Path(hybridpp.__file__).parent)
    assert code_owner(str(tmp_path / "link/errors.py")) is CodeOwner.HYBRIDPP


def test_names_of_modules_are_compared_whole():
    assert is_own_module("hybridpp.config")
    assert is_own_module("hybridpp_plugins.engine")
    assert not is_own_module("hybridpp_experiments.models")
    assert is_library_module("torch.nn")
    assert not is_library_module("torch_geometric.nn")


def test_a_script_in_a_folder_of_this_librarys_name_sees_its_own_lines(tmp_path):
    script = tmp_path / "hybridpp" / "hybridpp_plugins" / "train.py"
    script.parent.mkdir(parents=True)
    script.write_text("Settings(num_microbatches=0)\n")
    with pytest.raises(ConfigError) as caught:
        exec(compile(script.read_text(), str(script), "exec"), {"Settings": PipelineConfig})
    told = failure_text(caught.value, 0, 1).splitlines()
    assert told[-3:-1] == [f'  File "{script}", line 1, in <module>', "    Settings(num_microbatches=0)"]
    assert all("config/pipeline.py" not in line for line in told)


def test_generated_methods_are_not_shown_as_the_scripts():
    @dataclasses.dataclass
    class Settings:
        size: int

        def __post_init__(self) -> None:
            raise ConfigError("size is at least 1.")

    with pytest.raises(ConfigError) as caught:
        Settings(0)
    assert "<string>" not in failure_text(caught.value, 0, 1)
