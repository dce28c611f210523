"""Every block of the READMEs runs, and the README is short."""

import re
import shlex
import subprocess
import sys
import tomllib
from importlib.metadata import EntryPoint
from types import ModuleType

import pytest
import torch
from processes import run_script
from support import ROOT
from torch import nn
from transformers import ViTConfig, ViTForImageClassification

from hybridpp import Booster, Plugin, registry
from hybridpp.cli import main
from hybridpp.cluster import Loopback
from hybridpp.errors import ConfigError

FLAGGED = ("README.md", "docs/running.md")  # pages that show the example with flags


def blocks(file, language):
    return re.findall(rf"```{language}\n(.*?)```", (ROOT / file).read_text(), re.DOTALL)


def commands(file="README.md"):
    lines = "".join(blocks(file, "bash")).replace("\\\n", " ").splitlines()
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
    given = [word for file in FLAGGED for command in commands(file) for word in shlex.split(command)[2:3]]
    flags = [word.removeprefix("ARGS=") for word in given if word.startswith("ARGS=") and "--help" not in word]
    parsed = {text: options.parse_args(shlex.split(text)) for text in flags}
    (arguments,) = [arguments for text, arguments in parsed.items() if "--model" in text]
    assert any(arguments.timeline for arguments in parsed.values())
    assert arguments.microbatch_size == 4
    assert arguments.num_microbatches is None


def test_the_other_commands_name_files_that_exist():
    (bare,) = [command for command in commands() if command.startswith("PYTHONPATH")]
    assert (ROOT / bare.split()[-1]).exists()


def test_the_command_prints_the_cut_that_is_shown(tmp_path, capsys):
    ViTConfig(num_labels=1000, architectures=["ViTForImageClassification"]).save_pretrained(tmp_path)
    (command,), (table,) = commands("docs/cutting.md"), blocks("docs/cutting.md", "text")
    assert main(shlex.split(command.replace("path/to/vit", str(tmp_path)))[1:]) == 0
    # The page leaves out the legend below the table.
    assert capsys.readouterr().out.startswith(table)


def test_the_readme_fits_on_three_screens():
    assert len((ROOT / "README.md").read_text().splitlines()) <= 150


class TwoWeights(nn.Module):
    """So small that its average over replicas can be computed by hand."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([0.5, 1.0]))

    def forward(self, x):
        return self.weight * x


def local_sgd_job(script, folder):
    """A rank of the job that plugins/README.md shows, on 16 samples; its weights as trained, and as loaded again."""
    plugin, training = (source.replace('"model.pt"', repr(str(folder / "model.pt"))) for source in script)
    dataset = [(torch.full((2,), 1.0 + i % 2), torch.zeros(2)) for i in range(16)]
    namespace = {"Booster": Booster, "model": TwoWeights(), "dataset": dataset}
    exec(plugin, namespace)
    namespace["optimizer"] = torch.optim.SGD(namespace["model"].parameters(), lr=0.1)
    exec(training, namespace)
    booster, model = namespace["booster"], namespace["model"]
    trained = model.weight.detach().clone()
    with torch.no_grad():
        model.weight.zero_()
    booster.load_model(model, folder / "model.pt")
    booster.plugin.close()
    return trained, model.weight.detach().clone()


def test_the_plugin_that_the_plugins_readme_shows_trains_and_saves(tmp_path):
    script = blocks("plugins/README.md", "python")
    # Samples are 1 on rank 0 and 2 on rank 1; the loss is the mean of (weight * x) ** 2 over samples and both weights.
    weights = [torch.tensor([0.5, 1.0])] * 2
    for step in range(1, 5):
        weights = [weight * (1 - 0.1 * x**2) for weight, x in zip(weights, (1.0, 2.0), strict=True)]
        if step % 2 == 0:
            weights = [(weights[0] + weights[1]) / 2] * 2
    for trained, loaded in Loopback(2).run(lambda: local_sgd_job(script, tmp_path)):
        torch.testing.assert_close(trained, weights[0])
        assert torch.equal(loaded, trained)


def test_the_files_that_the_plugins_readme_lists_exist():
    named = re.findall(r"`(\w+\.py)`", (ROOT / "plugins/README.md").read_text())
    files = {path.name for path in (ROOT / "plugins/hybridpp_plugins").glob("*.py")} - {"__init__.py"}
    assert len(named) == len(set(named)) > 20
    assert set(named) <= files


def test_the_plugin_that_the_plugins_readme_shows_has_a_name(monkeypatch):
    namespace = {}
    source, _ = blocks("plugins/README.md", "python")
    exec(source, namespace)
    (declaration,) = blocks("plugins/README.md", "toml")
    ((name, value),) = tomllib.loads(declaration)["project"]["entry-points"]["hybridpp.plugins"].items()
    package = ModuleType("my_package")
    vars(package).update(namespace)
    monkeypatch.setitem(sys.modules, "my_package", package)
    entry = EntryPoint(name, value, registry.GROUP)
    monkeypatch.setattr(registry, "entry_points", lambda group, name=None: [entry] if name == entry.name else [])
    plugin = Plugin.from_name(name, period=2)
    assert (type(plugin).__name__, plugin.period) == ("LocalSGDPlugin", 2)
    assert Booster(plugin=name).plugin.period == 8
    with pytest.raises(ConfigError, match=r"^period is a number of steps, at least 1: got period=0\.$"):
        Plugin.from_name(name, period=0)
