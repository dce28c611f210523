"""The command tells what a folder of checkpoints holds, and finds what is damaged."""

import re

import pytest
import torch
from torch import nn

from hybridpp import Booster, HybridParallelPlugin
from hybridpp.checkpoint.commit import begin, step_folder
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
    titles, _, *rows = [[cell.strip() for cell in re.split(r" \| |-\+-", line)] for line in text.strip().splitlines()]
    assert titles == ["step", "saved", "size", "files", "layout", "state"]
    assert [(row[0], row[-1]) for row in rows] == [
        ("7", "incomplete: its save was killed, or is running"),
        ("2", "complete"),
        ("1", "complete"),
    ]
    assert rows[1][3:5] == ["1", "tp=1 x pp=1 x dp=1"]
    (file,) = step_folder(path, 2).glob("*.safetensors")
    file.unlink()
    assert f"damaged: {file.name} is missing" in output(capsys, "list", path)[1]


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


@pytest.mark.parametrize("action", ["list", "verify", "show"])
def test_a_folder_without_checkpoints_is_one_line(tmp_path, capsys, action):
    code, text = output(capsys, action, tmp_path / "none")
    assert code == 2
    assert text == f"hybridpp: {tmp_path / 'none'} holds no checkpoint.\nPass the folder that booster.save was given.\n"


def test_a_step_that_is_not_there_is_named(path, capsys):
    assert "holds no checkpoint of step 7.\nIt holds [2, 1]." in output(capsys, "show", path, "--step", 7)[1]
