"""What docs/schedules.md shows is what happens."""

import re
import shlex
from contextlib import chdir
from functools import partial
from pathlib import Path

import pytest
import torch
from support import ROOT, image_batch, model_loss, tiny_vit
from test_readme import blocks

from hybridpp import Booster, DistCoordinator, HybridParallelPlugin
from hybridpp.cli import main
from hybridpp.cluster import Loopback
from hybridpp.schedule import find_schedule

PAGE = "docs/schedules.md"
NAMED, OWN, OWN_PLUGIN, RECORDED, SEARCHED, FOUND = blocks(PAGE, "python")
# Commands and what they print; nothing where the page does not show it.
SHOWN = [
    tuple(part.partition("\n")[::2])
    for block in blocks(PAGE, "console")
    for part in re.split(r"^\$ ", block, flags=re.M)[1:]
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Where the page's Python has run, training included."""
    path = tmp_path_factory.mktemp("page")
    (path / "typo.csv").write_text("0F0,0F1,,0B0,0B1\n1F0,1B0,1B1,1F1\n")
    (path / "costs.json").write_text(*blocks(PAGE, "json"))
    with chdir(path):
        namespace = {}
        exec(OWN, namespace)
        Loopback(2).run(lambda: train(dict(namespace)))
    return path


def train(namespace):
    exec(NAMED + OWN_PLUGIN, namespace)
    booster = Booster(plugin=namespace["plugin"], device="cpu")
    model = tiny_vit()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    boosted = booster.boost(model, optimizer, model_loss, sample=image_batch(4))
    namespace.update(
        booster=booster,
        coordinator=DistCoordinator(),
        model=boosted.model,
        optimizer=boosted.optimizer,
        criterion=model_loss,
        data_iter=iter([image_batch(4)]),
        Path=Path,
    )
    exec(RECORDED, namespace)


@pytest.mark.parametrize(("command", "output"), SHOWN, ids=[command for command, _ in SHOWN])
def test_a_command_prints_what_the_page_shows(folder, capsys, command, output):
    program, *arguments = shlex.split(command)
    assert program == "hybridpp"
    with chdir(folder):
        code = main(arguments)
    printed = capsys.readouterr()
    assert code == (2 if printed.err else 0)
    if output:
        assert printed.out + printed.err == output
    for file in re.findall(r"--(?:draw|save|trace) (\S+)", command):
        assert (folder / file).stat().st_size > 0


def test_training_left_its_picture(folder):
    assert (folder / "step.svg").stat().st_size > 0


def test_the_schedule_found_from_the_measured_step_trains(folder, capsys):
    def step(setting):
        torch.manual_seed(0)
        exec(setting, names := {"HybridParallelPlugin": HybridParallelPlugin})
        booster = Booster(plugin=names["plugin"], device="cpu")
        optimizer = torch.optim.SGD((model := tiny_vit()).parameters(), lr=0.1)
        boosted = booster.boost(model, optimizer, model_loss, sample=image_batch(4))
        booster.execute_pipeline(iter([image_batch(4)]), boosted.model, model_loss, boosted.optimizer)
        boosted.optimizer.step()
        return {name: parameter.detach().tolist() for name, parameter in boosted.model.named_parameters()}

    with chdir(folder):
        exec(SEARCHED, {})
        assert re.fullmatch(r"\S.*: [\d.]+ ms, [\d.]+ % above a lower bound\n", capsys.readouterr().out)
        assert main(["schedule", "check", "best.csv"]) == 0
        found, default = (Loopback(2).run(partial(step, text)) for text in (FOUND, NAMED.replace("zb-v", "1f1b")))
    assert found == default


@pytest.mark.parametrize("cells", blocks(PAGE, "text"))
def test_the_table_shown_is_a_schedule(tmp_path, capsys, cells):
    (tmp_path / "plan.csv").write_text(cells)
    assert main(["schedule", "check", str(tmp_path / "plan.csv")]) == 0
    assert capsys.readouterr().out.startswith("OK: 2 ranks, 2 stages, 2 micro-batches, ")


def test_the_other_spelling_means_the_same():
    def spelled():
        namespace = {}
        exec(NAMED.replace('schedule="zb-v"', 'pp_style="zbv"'), namespace)
        return find_schedule(namespace["plugin"].settings.pipeline.schedule).name

    assert 'pp_style="zbv"' in (ROOT / PAGE).read_text()
    assert Loopback(2).run(spelled) == ["zb-v", "zb-v"]
