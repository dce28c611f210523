"""The Trainer's example: interleaved stages and replicas, resumed; what it saved loads into the plain model."""

import runpy

import torch
from processes import run_script
from safetensors.torch import load_file
from support import ROOT

SCRIPT = ROOT / "examples/resnet/train.py"
FLAGS = ("--max-samples", "80", "--batch-size", "16", "--num-blocks", "1")


def test_it_trains_two_chunks_on_each_of_two_stages_and_resumes(tmp_path, monkeypatch):
    flags = (*FLAGS, "--output", str(tmp_path))
    first = run_script(2, SCRIPT, *flags, "--epochs", "1", "--tracker", "tensorboard")
    assert first.returncode == 0, first.stderr
    assert "Layout: pp=2 x dp=1, stages per process: 2; 64 images to train on, 16 held out" in first.stdout
    assert len(list(tmp_path.glob("resnet/events.*"))) == 1
    # On replicas, from where two stages ended.
    second = run_script(2, SCRIPT, *flags, "--epochs", "2", "--pp-size", "1", "--resume")
    assert second.returncode == 0, second.stderr
    assert "Layout: pp=1 x dp=2, stages per process: 1" in second.stdout
    assert "Epoch [1/1]: 100%" in first.stderr
    assert "Epoch [2/2]: 100%" in second.stderr
    assert "Epoch [1/2]" not in second.stderr

    monkeypatch.syspath_prepend(str(SCRIPT.parent))
    script = runpy.run_path(str(SCRIPT))
    model = script["build_model"](script["NUM_CLASSES"], num_blocks=1)
    model.load_state_dict(load_file(tmp_path / "model.safetensors"))
    _, held_out = script["load_images"](80, seed=42)
    images, labels = map(torch.stack, zip(*held_out, strict=True))
    accuracy = (script["predict"](model, images) == labels).float().mean().item()
    assert f"Held-out accuracy: {accuracy:.2%}" in second.stdout
