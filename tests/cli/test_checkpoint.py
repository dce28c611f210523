"""The command tells what a folder of checkpoints holds, and finds what is damaged."""

import os
import re
import warnings
from datetime import datetime

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch import nn

from hybridpp import Booster, HybridParallelPlugin
from hybridpp.checkpoint.commit import begin, open_step, step_folder
from hybridpp.checkpoint.manifest import MANIFEST
from hybridpp.cli import main


@pytest.fixture
def path(tmp_path):
    """Two checkpoints and what a killed save left."""
    booster = Booster(plugin=HybridParallelPlugin())
    loader = booster.plugin.prepare_dataloader([torch.ones(2)] * 6, batch_size=2)
    model = nn.Linear(2, 3)
    parts = booster.boost(model, torch.optim.AdamW(model.parameters(), lr=0.5), None, loader)
    for step, batch in enumerate(loader, start=1):
        parts.optimizer.backward(parts.model(batch).sum())
        parts.optimizer.step()
        if step < 3:
            booster.save(tmp_path, step=step, extras={"best": 1.5})
    begin(tmp_path, 7, "01234567")
    return tmp_path


def output(capsys, *arguments):
    code = main(["checkpoint", *map(str, arguments)])
    printed = capsys.readouterr()
    return code, printed.out + printed.err


def test_list_names_complete_and_incomplete_checkpoints(path, capsys):
    code, text = output(capsys, "list", path)
    assert code == 0
    table, note = text.strip().split("\n\n")
    assert note.startswith("complete: the manifest is intact, and files have the sizes that it names.")
    titles, _, *rows = [[cell.strip() for cell in re.split(r" \| |-\+-", line)] for line in table.splitlines()]
    assert titles == ["step", "saved", "size", "files", "layout", "state"]
    assert [(row[0], row[-1]) for row in rows] == [
        ("7", "incomplete: its save was killed, or is running"),
        ("2", "complete"),
        ("1", "complete"),
    ]
    assert rows[1][3:5] == ["1", "tp=1 x pp=1 x dp=1"]
    (file,) = step_folder(path, 2).glob("*.safetensors")
    file.write_bytes(file.read_bytes()[:-1])
    assert f"damaged: {file.name} has {file.stat().st_size} bytes, and was" in output(capsys, "list", path)[1]
    file.unlink()
    assert f"damaged: {file.name} is missing" in output(capsys, "list", path)[1]


def test_list_tells_when_a_checkpoint_was_saved_and_not_when_it_was_copied(path, capsys):
    saved = datetime.fromtimestamp(open_step(path, 2).saved_at).isoformat(" ", "seconds")
    os.utime(step_folder(path, 2) / MANIFEST, (10**9, 10**9))
    assert f"   2 | {saved} | " in output(capsys, "list", path)[1]


def test_verify_finds_a_flipped_bit_and_names_the_file(path, capsys):
    code, text = output(capsys, "verify", path)
    assert code == 0
    assert text.count("intact") == 2
    (file,) = step_folder(path, 1).glob("*.safetensors")
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    code, text = output(capsys, "verify", path)
    assert code == 1
    assert [re.split(r" +\| +", line.strip())[-1] for line in text.splitlines()[2:4]] == ["intact", "damaged"]
    assert f"\nstep 1: {file.name} is damaged: it does not have the digest that it was written with.\n" in text
    assert output(capsys, "verify", path, "--step", 2)[0] == 0


def test_show_tells_what_a_checkpoint_holds(path, capsys):
    code, text = output(capsys, "show", path, "--tensors")
    assert code == 0
    for line in (
        "step 2 in",
        "saved by tp=1 x pp=1 x dp=1, zero_stage=0",
        "model 0: Linear",
        "  2 weights and buffers, 9 numbers: 2 of float32",
        "  AdamW: 1 groups, lr 0.5",
        "  2 steps applied, 0 skipped",
        "  data: epoch 0, 4 samples of it taken",
        "extras: best",
    ):
        assert line in text
    assert re.search(r"^model0/optimizer/weight/exp_avg +\| float32 \| +3x2 \| +24 B \| +1$", text, re.M)
    assert "exp_avg" not in output(capsys, "show", path, "--step", 1)[1]


@pytest.fixture(scope="module")
def others(tmp_path_factory):
    """What users pass in place of a folder of checkpoints."""
    path, model = tmp_path_factory.mktemp("others"), nn.Linear(2, 3)
    (path / "empty").mkdir()
    (path / "notes.txt").write_text("mine")
    save_file(model.state_dict(), path / "weights.safetensors")
    torch.save({"model": model.state_dict()}, path / "state.pt")
    (path / "weights").mkdir()
    save_file(model.state_dict(), path / "weights/model.safetensors")
    with warnings.catch_warnings(action="ignore"):
        dcp.save({"model": model.state_dict()}, checkpoint_id=path / "dcp", no_dist=True)
    begin(path / "unfinished", 3, "01234567")
    return path


HOLDS_WEIGHTS = "It holds weights, for booster.load_model, and for hybridpp checkpoint import."
OTHERS = {
    "none": "there is no folder {}.",
    "empty": "{} is empty.",
    "notes.txt": "{} is a file, and checkpoints of runs are folders.",
    "weights.safetensors": f"{{}} is a file, and checkpoints of runs are folders.\n{HOLDS_WEIGHTS}",
    "state.pt": f"{{}} is a file, and checkpoints of runs are folders.\n{HOLDS_WEIGHTS}",
    "weights": f"{{}} holds no checkpoint.\n{HOLDS_WEIGHTS}",
    "dcp": "{} holds no checkpoint.\nIt is a folder of torch.distributed.checkpoint, for hybridpp checkpoint import.",
    "unfinished": "{} holds no complete checkpoint, only what saves wrote that were killed or are still running, of "
    "the steps [3].",
}


@pytest.mark.parametrize("action", ["list", "verify", "show", "reshard", "export"])
@pytest.mark.parametrize("name", OTHERS)
def test_what_is_no_folder_of_checkpoints_is_named_with_what_reads_it(others, tmp_path, capsys, name, action):
    more = {"export": [tmp_path / "out", "--to", "torch"], "reshard": [tmp_path / "out"]}.get(action, [])
    code, text = output(capsys, action, others / name, *more)
    if (name, action) == ("unfinished", "list"):
        assert code == 0
        assert "incomplete: its save was killed, or is running" in text
        return
    assert code == 2
    given = "Pass the folder that booster.save was given.\n"
    expected = OTHERS[name].format(others / name)
    assert text.replace("\n", " ") == f"hybridpp: {expected}\n{given}".replace("\n", " ")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("none", "there is no folder or file {}."),
        ("empty", "{} is empty."),
        ("notes.txt", "{} is no file of torch.save."),
        ("unfinished", "It holds saves of a run that were killed or are still running."),
    ],
)
def test_what_cannot_be_imported_is_named(others, tmp_path, capsys, name, reason):
    code, text = output(capsys, "import", others / name, tmp_path / "out")
    assert code == 2
    assert reason.format(others / name) in text
    assert "\nPass" in text or " Pass" in text
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("action", ["show", "reshard", "export"])
def test_a_damaged_step_is_named_with_the_way_to_an_intact_one(path, tmp_path, capsys, action):
    manifest = step_folder(path, 2) / "manifest.json"
    manifest.write_text(manifest.read_text().replace("AdamW", "AdamX"))
    more = {"export": [tmp_path / "out", "--to", "torch"], "reshard": [tmp_path / "out"], "show": []}[action]
    code, text = output(capsys, action, path, *more)
    assert code == 2
    assert f"step 2 in {path} cannot be used: manifest.json is damaged" in text
    assert "Choose an intact step by --step: hybridpp checkpoint verify finds them." in text
    assert output(capsys, action, path, *more, "--step", 1)[0] == 0


def test_a_step_that_is_not_there_is_named(path, capsys):
    assert "holds no checkpoint of step 7.\nChoose one of [2, 1]." in output(capsys, "show", path, "--step", 7)[1]
