import json
import os

import pytest
import torch.distributed as dist
from processes import free_port, run_ranks
from transformers import LlamaConfig

from hybridpp.cli import main, profile
from hybridpp.cluster import DistCoordinator
from hybridpp.estimate import DEVICES

LLAMA = LlamaConfig(
    hidden_size=16,
    num_hidden_layers=4,
    num_attention_heads=2,
    num_key_value_heads=2,
    intermediate_size=32,
    vocab_size=50,
    architectures=["LlamaForCausalLM"],
)


@pytest.fixture
def command():
    return "profile"


def test_a_profile_with_a_model_gives_estimates_measured_times(printed, tmp_path, capsys):
    model, profile = str(tmp_path / "model"), str(tmp_path / "device.json")
    LLAMA.save_pretrained(model)
    flags = ("--model", model, "--precision", "fp32", "--microbatch-size", "2", "--sequence-length", "16")
    text = printed("--output", profile, "--device", "cpu", *flags)
    assert "cpu:" in text
    assert "forward" in text
    assert main(["estimate", *flags, "--device", profile, "--pp-size", "2", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["time"]["is_measured"]
    # A second model is added, and another micro-batch has no times.
    assert "cpu:" not in printed("--output", profile, "--device", "cpu", *flags, "--recompute")
    assert len(json.loads((tmp_path / "device.json").read_text())["measured"]) == 2
    assert main(["estimate", *flags, "--microbatch-size", "3", "--device", profile, "--json"]) == 0
    assert not json.loads(capsys.readouterr().out)["time"]["is_measured"]


def test_another_kind_of_file_is_refused(refused, tmp_path):
    assert "--output is a JSON file" in refused("--output", str(tmp_path / "device.txt"))


def test_a_job_of_srun_needs_an_address_and_takes_one(refused, monkeypatch, tmp_path):
    for name, value in {"PROCID": "0", "NTASKS": "2", "LOCALID": "0", "STEP_NUM_TASKS": "2"}.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    output = ("--device", "cpu", "--output", str(tmp_path / "device.json"))
    assert "got None. Pass --address HOST:PORT" in refused(*output)
    assert "got 'host0'" in refused(*output, "--address", "host0")


def test_ranks_of_torchrun_join_so_that_links_are_measured(tmp_path, monkeypatch):
    monkeypatch.setattr(profile, "measure_device", lambda where: DEVICES["cpu"])
    path, port = tmp_path / "device.json", str(free_port())

    def run():
        rank = str(dist.get_rank())
        DistCoordinator().destroy()
        os.environ |= {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": "2"}
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        return main(["profile", "--output", str(path), "--device", "cpu"])

    assert run_ranks(run, 2) == [0, 0]
    measured = json.loads(path.read_text())
    assert measured["message_us"] not in (0, DEVICES["cpu"].message_us)
