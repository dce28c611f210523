"""What other libraries wrote becomes a checkpoint that a run resumes from; what is missing begins anew, by name."""

import logging
import os
import pickle
import re
from dataclasses import replace

import pytest
import torch
import torch.distributed.checkpoint as dcp
from plugins.zero_models import TiedModel
from run_checkpoints import Run, on_layout, tensors_in
from support import assert_same
from torch import nn
from transformers import MixtralConfig, MixtralForCausalLM

from hybridpp import Booster, HybridParallelPlugin
from hybridpp.checkpoint.export_run import one_process
from hybridpp.cli import main


@pytest.fixture
def call(capsys):
    def run(*arguments, code=0):
        assert main(["checkpoint", *map(str, arguments)]) == code
        printed = capsys.readouterr()
        return printed.err if code else printed.out

    return run


@pytest.fixture(scope="module")
def run_path(tmp_path_factory):
    path = tmp_path_factory.mktemp("run")

    def save(make):
        run = make()
        run.steps([0])
        run.booster.save(path, step=1)

    on_layout(save, dp_size=2, zero_stage=2)
    return path


def parts_of(path, step):
    """Weights and moments, without what belongs to no parameter."""
    return {key: tensor for key, tensor in tensors_in(path, step).items() if "/step" not in key}


@pytest.mark.parametrize("kind", ["torch", "dcp"])
def test_an_export_comes_back_with_its_moments(run_path, tmp_path, call, kind, caplog):
    call("export", run_path, tmp_path / "out", "--to", kind)
    text = call("import", tmp_path / "out", tmp_path / "run", "--step", 7)
    assert re.search(r"^optimizer +\| of \d+ parameters in 2 groups$", text, re.M)
    assert "random generators | fresh: not in this format" in text
    imported, expected = parts_of(tmp_path / "run", 7), parts_of(run_path, 1)
    if kind == "dcp":  # which does not say that two names are one weight
        assert torch.equal(imported.pop("model0/weights/head.weight"), expected["model0/weights/embed.weight"])
    assert_same(imported, expected)

    def go_on(make):
        run = make()
        resumed = run.booster.resume(tmp_path / "run")
        run.steps([1])
        return resumed.step, run.optimizer.counts.applied, len(run.optimizer.unwrap().state)

    with caplog.at_level(logging.WARNING, "hybridpp"):
        for step, applied, states in on_layout(go_on, pp_size=2, tp_size=2):
            assert (step, applied) == (7, 2)
            assert states > 0
    assert "so these begin anew: the random generators, the LR schedule." in caplog.text
    assert "TiedModel" not in call("show", tmp_path / "run")


def mixtral():
    torch.manual_seed(1)
    sizes = {"hidden_size": 8, "intermediate_size": 12, "num_attention_heads": 2, "num_key_value_heads": 1}
    config = MixtralConfig(**sizes, vocab_size=16, num_hidden_layers=1, num_local_experts=3, tie_word_embeddings=True)
    return MixtralForCausalLM(config)


def test_a_folder_of_the_hub_is_converted_and_its_optimizer_is_fresh(tmp_path, call, caplog):
    """Experts are single tensors there, and stacked in the model."""
    saved = mixtral()
    saved.save_pretrained(tmp_path / "hub")
    text = call("import", tmp_path / "hub", tmp_path / "run")
    assert "from a Hugging Face folder" in text
    assert "optimizer         | fresh: the source has none" in text
    booster = Booster(plugin=HybridParallelPlugin())
    model = mixtral()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    parts = booster.boost(model, torch.optim.AdamW(model.parameters()), None, sample=torch.zeros(1, 4).long())
    with caplog.at_level(logging.WARNING, "hybridpp"):
        assert booster.resume(tmp_path / "run").step == 0
    assert "begin anew: the random generators, the optimizer's state." in caplog.text
    assert_same(dict(parts.model.named_parameters()), dict(saved.named_parameters()))
    call("export", tmp_path / "run", tmp_path / "again", "--to", "hf")
    assert_same(MixtralForCausalLM.from_pretrained(tmp_path / "again").state_dict(), saved.state_dict())


def test_an_optimizer_is_taken_by_the_names_of_its_parameters(tmp_path, call):
    model = nn.Linear(2, 3)
    for named, expected in ((True, "of 2 parameters in 1 groups"), (False, "fresh: its parameters have numbers")):
        optimizer = torch.optim.SGD(model.named_parameters() if named else model.parameters(), lr=0.1, momentum=0.9)
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "x.pt")
        assert expected in call("import", tmp_path / "x.pt", tmp_path / f"run {named}")
    booster = Booster(plugin=HybridParallelPlugin())
    fresh = nn.Linear(2, 3)
    booster.boost(fresh, torch.optim.AdamW(fresh.parameters()))
    with pytest.raises(
        RuntimeError, match=r"an optimizer with dampening, momentum, nesterov cannot be loaded into AdamW"
    ):
        booster.resume(tmp_path / "run True")
    other = Booster(plugin=HybridParallelPlugin())
    parts = other.boost(fresh_model := nn.Linear(2, 3), torch.optim.SGD(fresh_model.parameters(), lr=1, momentum=0.9))
    other.resume(tmp_path / "run True")
    assert parts.optimizer.param_groups[0]["lr"] == 0.1
    assert torch.equal(parts.optimizer.unwrap().state[fresh_model.bias]["momentum_buffer"], torch.ones(3))


class Planted:
    def __reduce__(self):
        return os.system, ("touch ran",)


def test_imports_run_no_code(tmp_path, call, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.save({"model": Planted()}, tmp_path / "x.pt")
    assert "cannot be read as a file of torch.save" in call("import", "x.pt", "run", code=2)
    state = {
        "model": {"w": torch.ones(2)},
        "optimizer": {"state": {"w": {"m": torch.ones(2)}}, "param_groups": Planted()},
    }
    with pytest.warns(UserWarning, match=r"torch.distributed is disabled"):
        dcp.save(state, checkpoint_id=tmp_path / "dcp", no_dist=True)
    (tmp_path / "ran").unlink(missing_ok=True)
    assert "optimizer.param_groups cannot be read" in call("import", "dcp", "run", code=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["dcp", "x.pt"]


def test_what_is_no_model_is_named_and_nothing_is_overwritten(tmp_path, call):
    torch.save([1], tmp_path / "list.pt")
    torch.save({"epoch": 1}, tmp_path / "epoch.pt")
    torch.save(TiedModel().state_dict(), tmp_path / "model.pt")
    (tmp_path / "empty").mkdir()
    for name, text in {
        "none": "there is no folder or file",
        "list.pt": "holds a list.\nSave a state dict",
        "epoch.pt": "holds no weights, but ['epoch'].\nSave the model's state_dict() under 'model'.",
        "empty": "is empty.\nPass the folder or file that is to be imported.",
    }.items():
        assert text in call("import", tmp_path / name, tmp_path / "run", code=2)
    call("import", tmp_path / "model.pt", tmp_path / "run", "--step", 3)
    text = call("import", tmp_path / "model.pt", tmp_path / "run", "--step", 3, code=2)
    assert "holds a checkpoint of step 3, which is not overwritten" in text
    run = Run()
    run.booster.resume(tmp_path / "run")
    assert_same(run.model.state_dict(), TiedModel().state_dict())


class Evil:
    def __reduce__(self):
        return (os.mkdir, ("evil",))


def test_a_named_pipe_among_the_files_of_a_dcp_folder_is_no_wait(tmp_path, call):
    with one_process():
        dcp.save({"model": nn.Linear(2, 2).state_dict()}, checkpoint_id=tmp_path / "dcp", no_dist=True)
    (tmp_path / "dcp" / "__0_0.distcp").unlink()
    os.mkfifo(tmp_path / "dcp" / "__0_0.distcp")
    assert "its file __0_0.distcp is no regular file" in call("import", tmp_path / "dcp", tmp_path / "out", code=2)


def test_no_code_of_a_dcp_folder_runs_and_no_file_outside_is_read(tmp_path, monkeypatch, call):
    monkeypatch.chdir(tmp_path)
    with one_process():
        dcp.save({"model": nn.Linear(2, 2).state_dict()}, checkpoint_id=tmp_path / "dcp", no_dist=True)
    right = pickle.loads((tmp_path / "dcp" / ".metadata").read_bytes())
    (tmp_path / "dcp" / ".metadata").write_bytes(pickle.dumps(Evil()))
    text = call("import", tmp_path / "dcp", tmp_path / "out", code=2)
    assert "it names posix.mkdir, which is no part of such a file" in text
    for index, stored in right.storage_data.items():
        right.storage_data[index] = replace(stored, relative_path=f"../dcp/{stored.relative_path}")
    (tmp_path / "dcp" / ".metadata").write_bytes(pickle.dumps(right))
    text = call("import", tmp_path / "dcp", tmp_path / "out", code=2)
    assert "its .metadata names a file '../dcp/__0_0.distcp', which is none of such a folder" in text
    assert [path.name for path in tmp_path.iterdir()] == ["dcp"]


@pytest.mark.parametrize(
    "state",
    [
        {"model": {"a": torch.ones(2)}, "optimizer": {"state": 3, "param_groups": []}},
        {"model": {"a": torch.ones(2)}, "optimizer": 3},
        {"model": {"a": torch.ones(2)}, "optimizer": {"state": {}, "param_groups": [{}]}},
        {"model": {"a": torch.ones(2).to_sparse()}},
    ],
)
def test_a_file_of_another_form_is_one_error(tmp_path, state, call):
    torch.save(state, tmp_path / "x.pt")
    text = call("import", tmp_path / "x.pt", tmp_path / "out", code=2)
    assert re.search("is not in a form that is imported|is a Tensor of torch.sparse_coo", text), text
    assert [path.name for path in tmp_path.iterdir()] == ["x.pt"]
