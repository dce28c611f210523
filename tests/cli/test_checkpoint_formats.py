"""Checkpoints of runs are written in other formats, and read by the libraries whose formats they are."""

import json
import re
import shutil

import pytest
import torch
import torch.distributed.checkpoint as dcp
from mounts import fill_disk, on_small_disk
from run_checkpoints import Run, on_layout, tensors_in
from safetensors.torch import load_file
from support import assert_same
from torch import nn
from transformers import MixtralConfig, MixtralForCausalLM

from hybridpp import Booster, HybridParallelPlugin
from hybridpp.checkpoint.commit import open_step, step_folder
from hybridpp.checkpoint.older_config import with_older_names
from hybridpp.cli import main
from hybridpp.cli.checkpoint_formats import run_export
from hybridpp.cli.commands.checkpoint import ExportArguments
from hybridpp.errors import CheckpointError


def mixtral():
    torch.manual_seed(0)
    sizes = {"hidden_size": 8, "intermediate_size": 12, "num_attention_heads": 2, "num_key_value_heads": 1}
    config = MixtralConfig(**sizes, vocab_size=16, num_hidden_layers=2, num_local_experts=3, tie_word_embeddings=True)
    return MixtralForCausalLM(config).bfloat16()


def save_pretrained_run(path):
    booster = Booster(plugin=HybridParallelPlugin(precision="bf16"))
    model = mixtral()
    parts = booster.boost(model, torch.optim.AdamW(model.parameters()), None, sample=torch.zeros(1, 4).long())
    booster.save(path, step=5)
    return parts.model


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Checkpoints of a tied model on two stages of two replicas that divide its state, and of one with experts."""
    path = tmp_path_factory.mktemp("runs")

    def save(make):
        run = make()
        run.steps([0])
        run.booster.save(path / "plain", step=1)

    on_layout(save, pp_size=2, dp_size=2, zero_stage=1)
    save_pretrained_run(path / "moe")
    return path


@pytest.fixture
def call(capsys):
    def run(*arguments, code=0):
        assert main(["checkpoint", *map(str, arguments)]) == code
        printed = capsys.readouterr()
        return printed.err if code else printed.out

    return run


def test_an_exported_folder_is_what_from_pretrained_reads(runs, tmp_path, call):
    text = call("export", runs / "moe", tmp_path / "hf", "--to", "hf")
    assert re.search(r"^ +5 \| MixtralForCausalLM \| +\d+ \| no +\| [\d.]+ KiB \| .*/hf$", text, re.M)
    loaded, info = MixtralForCausalLM.from_pretrained(tmp_path / "hf", output_loading_info=True)
    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert loaded.dtype == torch.bfloat16
    assert loaded.lm_head.weight is loaded.model.embed_tokens.weight
    assert_same(dict(loaded.named_parameters()), dict(mixtral().named_parameters()))
    mixtral().save_pretrained(tmp_path / "theirs")
    files = [load_file(tmp_path / name / "model.safetensors") for name in ("hf", "theirs")]
    assert set(files[0]) == set(files[1])
    configs = [json.loads((tmp_path / name / "config.json").read_text()) for name in ("hf", "theirs")]
    assert configs[0] == with_older_names(configs[1])


def test_an_export_takes_another_dtype_and_configuration(runs, tmp_path, call):
    mixtral().config.save_pretrained(tmp_path / "config")
    options = ("--dtype", "float32", "--config", tmp_path / "config")
    call("export", runs / "moe", tmp_path / "hf", "--to", "hf", *options)
    assert MixtralForCausalLM.from_pretrained(tmp_path / "hf").dtype == torch.float32
    config = json.loads((tmp_path / "config" / "config.json").read_text())
    (tmp_path / "config" / "config.json").write_text(json.dumps({**config, "model_type": "llama"}))
    text = call("export", runs / "moe", tmp_path / "other", "--to", "hf", *options, code=2)
    assert "has the configuration of a llama, and the checkpoint is of a MixtralForCausalLM" in text
    text = call("export", runs / "moe", tmp_path / "other", "--to", "torch", "--config", tmp_path, code=2)
    assert "--config is for --to hf: got --to torch" in text
    assert not (tmp_path / "other").exists()


def test_exports_to_torch_and_dcp_hold_weights_and_moments_by_names(runs, tmp_path, call):
    stored = tensors_in(runs / "plain", 1)
    call("export", runs / "plain", tmp_path / "x.pt", "--to", "torch")
    text = call("export", runs / "plain", tmp_path / "dcp", "--to", "dcp")
    assert re.search(r"1 \| TiedModel \| +\d+ \| yes", text)
    found = torch.load(tmp_path / "x.pt", weights_only=True)
    run = Run()
    run.model.load_state_dict(found["model"], strict=True)  # with both names of the tied weight
    target = {
        "model": {name: torch.zeros_like(tensor) for name, tensor in found["model"].items()},
        "optimizer": {
            "state": {
                name: {key: torch.zeros_like(value) for key, value in state.items()}
                for name, state in found["optimizer"]["state"].items()
            }
        },
    }
    with pytest.warns(UserWarning, match=r"torch.distributed is disabled"):
        dcp.load(target, checkpoint_id=tmp_path / "dcp", no_dist=True)
    for state in (found, target):
        assert_same(
            {n: t for n, t in state["model"].items() if n != "head.weight"},
            {k.removeprefix("model0/weights/"): t for k, t in stored.items() if k.startswith("model0/weights/")},
        )
        for name, entries in state["optimizer"]["state"].items():
            assert_same(
                {k: entries[k] for k in ("exp_avg", "exp_avg_sq")},
                {k: stored[f"model0/optimizer/{name}/{k}"] for k in ("exp_avg", "exp_avg_sq")},
            )
            assert entries["step"] == 1
    groups = found["optimizer"]["param_groups"]
    assert [group["weight_decay"] for group in groups] == [0.1, 0]
    assert {name for group in groups for name in group["params"]} == {n for n, _ in run.model.named_parameters()}


def test_a_resharded_checkpoint_resumes_as_the_old_one(runs, tmp_path, call):
    text = call("reshard", runs / "plain", tmp_path / "new", "--ranks", 3, "--file-size", "20KB")
    made = open_step(tmp_path / "new", 1)
    assert {name.split(".")[0] for name in made.files} == {"rank-00000", "rank-00001", "rank-00002"}
    sizes = [sum(f.nbytes for n, f in made.files.items() if n.startswith(f"rank-0000{r}")) for r in range(3)]
    assert max(sizes) < 1.5 * min(sizes)
    assert f"{tmp_path / 'new'} | " in text
    assert_same(tensors_in(tmp_path / "new", 1), tensors_in(runs / "plain", 1))

    def losses(path):
        def go_on(make):
            run = make()
            run.booster.resume(path)
            return run.steps([1])

        return on_layout(go_on, tp_size=2)

    assert losses(tmp_path / "new") == losses(runs / "plain")
    again = call("reshard", runs / "plain", tmp_path / "new", code=2)
    assert "holds a checkpoint of step 1, which is not overwritten.\nPass another folder." in again


@pytest.mark.parametrize("action", [("export", "--to", "torch"), ("export", "--to", "dcp"), ("reshard",)])
def test_a_damaged_checkpoint_is_written_in_no_format(runs, tmp_path, call, action):
    shutil.copytree(runs / "plain", tmp_path / "damaged")
    file = next(step_folder(tmp_path / "damaged", 1).glob("rank-00002*"))
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    command, *options = action
    text = call(command, tmp_path / "damaged", tmp_path / "out", *options, code=2)
    assert f"{file.name} is damaged" in text
    assert sorted(path.name for path in tmp_path.iterdir()) == ["damaged"]


def test_what_is_there_is_not_overwritten_and_what_fails_leaves_nothing(runs, tmp_path, call, monkeypatch):
    (tmp_path / "out").write_text("mine")
    text = call("export", runs / "plain", tmp_path / "out", "--to", "hf", code=2)
    assert text == (f"hybridpp: {tmp_path / 'out'} exists, and is not overwritten.\nRemove it, or pass another path.\n")
    text = call("export", runs / "plain", tmp_path / "new", "--to", "hf", "--model", 1, code=2)
    assert "holds 1 models: got --model 1.\nThe first one is 0." in text

    def full(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("hybridpp.checkpoint.safetensors_file.os.fsync", full)
    for arguments in (
        ("export", runs / "plain", tmp_path / "new", "--to", "hf"),
        ("reshard", runs / "plain", tmp_path / "new"),
    ):
        assert "No space left on device" in call(*arguments, code=2)
        assert [path.name for path in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize("form", ["torch", "dcp", "hf"])
def test_a_full_disk_is_told_as_one_and_leaves_nothing(runs, tmp_path, form):
    def child():
        filler = fill_disk(tmp_path, 32 * 1024)
        with pytest.raises(CheckpointError, match=r"out cannot be written: .*(No space left|free there)"):
            run_export(ExportArguments(path=str(runs / "plain"), out=str(tmp_path / "out"), to=form))
        return [path for path in tmp_path.iterdir() if path != filler]

    assert on_small_disk(tmp_path, child) == []


def test_a_model_of_no_known_class_has_a_folder_of_its_own_names(runs, tmp_path, call):
    call("export", runs / "plain", tmp_path / "folder", "--to", "hf")
    assert sorted(path.name for path in (tmp_path / "folder").iterdir()) == ["model.safetensors"]
    run = Run()
    run.booster.load_model(run.model, tmp_path / "folder")


def test_several_models_are_named(tmp_path, call):
    booster = Booster(plugin=HybridParallelPlugin())
    for width in (2, 3):
        booster.boost(nn.Linear(width, 1), sample=torch.zeros(1, width))
    booster.save(tmp_path / "run", step=1)
    text = call("export", tmp_path / "run", tmp_path / "out", "--to", "torch", code=2)
    assert "holds several models: 0 (Linear), 1 (Linear).\nChoose one by --model." in text
    call("export", tmp_path / "run", tmp_path / "out", "--to", "torch", "--model", 1)
    assert torch.load(tmp_path / "out", weights_only=True)["model"]["weight"].shape == (1, 3)
