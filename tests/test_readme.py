"""Every block of the READMEs runs."""

import re
import shlex
import subprocess
import sys
import tomllib

import pytest
from processes import run_script
from support import ROOT
from transformers import ViTConfig, ViTForImageClassification

from hybridpp import Booster
from hybridpp.cli import main
from hybridpp.plugin import Plugin


def blocks(file, language):
    return re.findall(rf"```{language}\n(.*?)```", (ROOT / file).read_text(), re.DOTALL)


def commands():
    lines = "".join(blocks("README.md", "bash")).splitlines()
    return [line.split("#")[0].strip() for line in lines if line.strip()]


def test_the_training_script_runs_as_told_and_its_folder_loads(tmp_path):
    (script,) = blocks("README.md", "python")
    file = tmp_path / "my_training.py"
    file.write_text(script)
    job = run_script(4, file, cwd=tmp_path)
    assert job.returncode == 0, job.stderr
    assert re.search(r"epoch 0: loss \d\.\d+\nepoch 1: loss \d\.\d+\n", job.stdout)
    assert ViTForImageClassification.from_pretrained(tmp_path / "outputs/my_vit").config.num_labels == 10


@pytest.mark.parametrize("command", [command for command in commands() if command.startswith("make")])
def test_make_knows_every_target(command):
    assert subprocess.run(["make", "-n", *shlex.split(command)[1:]], cwd=ROOT, capture_output=True).returncode == 0


def test_the_example_knows_every_flag():
    sys.path.insert(0, str(ROOT / "examples/vit"))
    try:
        import options
    finally:
        sys.path.pop(0)
    (with_flags,) = [command for command in commands() if command.startswith("make") and "--model" in command]
    arguments = options.parse_args(shlex.split(shlex.split(with_flags)[2].removeprefix("ARGS=")))
    assert arguments.microbatch_size == 4
    assert arguments.num_microbatches is None


def test_the_other_commands_name_files_that_exist():
    (bare,) = [command for command in commands() if command.startswith("PYTHONPATH")]
    assert (ROOT / bare.split()[-1]).exists()


def test_the_commands_print_the_tables_that_are_shown(tmp_path, capsys):
    ViTConfig(num_labels=1000, architectures=["ViTForImageClassification"]).save_pretrained(tmp_path)
    shown = [command for command in commands() if command.startswith("hybridpp")]
    for command, table in zip(shown, blocks("README.md", "text"), strict=True):
        assert main(shlex.split(command.replace("path/to/vit", str(tmp_path)))[1:]) == 0
        # The README leaves out the legend below a table.
        assert capsys.readouterr().out.startswith(table)


def test_the_plugin_that_the_plugins_readme_shows_works():
    namespace = {}
    (source,) = blocks("plugins/README.md", "python")
    exec(source, namespace)
    plugin = namespace["CompiledPlugin"]()
    assert isinstance(plugin, Plugin)
    assert Booster(plugin=plugin).plugin is plugin
    (declaration,) = blocks("plugins/README.md", "toml")
    assert "hybridpp.plugins" in tomllib.loads(declaration)["project"]["entry-points"]
