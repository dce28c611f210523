import json
import sys

import pytest
from transformers import Gemma3Config, LlamaConfig, ViTConfig

TINY = {"hidden_size": 16, "num_hidden_layers": 4, "num_attention_heads": 2, "intermediate_size": 32}
LLAMA = LlamaConfig(**TINY, num_key_value_heads=2, vocab_size=50, architectures=["LlamaForCausalLM"])
VIT = ViTConfig(**TINY, image_size=8, patch_size=4, num_labels=5, architectures=["ViTForImageClassification"])


@pytest.fixture
def command():
    return "estimate"


@pytest.fixture
def folder(tmp_path):
    def save(config):
        config.save_pretrained(tmp_path / "model")
        return str(tmp_path / "model")

    return save


def test_the_table_has_a_line_per_place_in_the_pipeline_and_the_time(printed, folder):
    text = printed("--model", folder(LLAMA), "--pp-size", "2", "--world-size", "4", "--zero-stage", "1")
    rows = [[cell.strip() for cell in line.split("|")] for line in text.splitlines() if "|" in line]
    assert rows[0][:3] == ["rank", "stages", "weights"]
    assert [row[0] for row in rows[1:]] == ["0", "1"]
    assert "4 ranks, 2 replicas, 4 micro-batches of 1" in text
    assert "step on h100 (from FLOPs and bytes):" in text


def test_json_has_bytes_that_add_up(printed, folder):
    text = printed("--model", folder(VIT), "--pp-size", "2", "--global-batch", "12", "--microbatch-size", "3", "--json")
    found = json.loads(text)
    assert (found["num_microbatches"], found["dp_size"], found["global_batch"]) == (4, 1, 12)
    for rank in found["ranks"]:
        parts = dict(rank["bytes"])
        assert parts.pop("total") == sum(parts.values())
    assert found["peak_bytes"] == max(rank["bytes"]["total"] for rank in found["ranks"])
    assert found["time"]["step_ms"] > 0


def test_a_longer_sequence_and_larger_micro_batch_hold_more(printed, folder):
    model = folder(LLAMA)

    def activations(*flags):
        return json.loads(printed("--model", model, "--json", *flags))["ranks"][0]["bytes"]["activations"]

    base = activations("--sequence-length", "32")
    assert 1.8 < activations("--sequence-length", "64") / base < 2.5
    assert 1.8 < activations("--sequence-length", "32", "--microbatch-size", "2") / base < 2.1
    some = activations("--sequence-length", "32", "--recompute-share", "0.5")
    assert activations("--sequence-length", "32", "--recompute") < some < base


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--pp-size", "2", "--world-size", "3"), "world size must be a multiple of tp_size"),
        (("--zero-stage", "1"), "zero_stage=1 divides over replicas, and there is one."),
        (
            ("--world-size", "2", "--global-batch", "5"),
            "got --global-batch 5. Use 4 or 6, or another --microbatch-size.",
        ),
        (("--memory", "1KiB"), "GiB more than --memory 1KiB. hybridpp plan searches for a layout that fits."),
        (("--device", "tpu"), "--device must be one of h100, a100, rtx4090, cpu"),
        (("--links", "wifi:1"), "--links are written as nvlink:8,ib:400"),
        (
            ("--layers-per-stage", "2,x"),
            "--layers-per-stage takes integers of at least 1, separated by commas: got 'x'.",
        ),
        (("--recompute", "--recompute-share", "0.5"), "and --recompute-share a share of them. Remove one."),
        (("--num-microbatches", "2", "--global-batch", "2"), "--global-batch and --num-microbatches say the same."),
        (("--pp-size", "16"), "for 16 stages (pp_size x num_model_chunks). Use"),
    ],
)
def test_what_cannot_be_is_refused(refused, folder, flags, message):
    assert message in refused("--model", folder(LLAMA), *flags)


def test_a_folder_without_a_configuration_is_refused(refused, tmp_path):
    assert "has no config.json" in refused("--model", str(tmp_path))


OWN = """
import torch
from torch import nn


class Chain(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(64, 64), nn.ReLU()) for _ in range(4))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


def make():
    return Chain(), torch.randn(2, 64)


def by_name():
    return Chain(), {"x": torch.randn(2, 64)}


def without_sample():
    return Chain()
"""


@pytest.fixture
def own(tmp_path):
    (tmp_path / "chain.py").write_text(OWN)
    return "chain.py"


@pytest.mark.parametrize("function", ["make", "by_name"])
def test_a_model_of_ones_own_is_estimated_on_its_sample(printed, own, function):
    text = printed("--model", f"{own}:{function}", "--pp-size", "2", "--microbatch-size", "3", "--json")
    first, second = (rank["bytes"] for rank in json.loads(text)["ranks"])
    # Two layers of 64 x 64 with their biases, in bf16.
    assert first["weights"] == second["weights"] == 2 * 2 * (64 * 64 + 64)
    assert first["activations"] > 0


def test_the_update_has_a_column_where_it_takes_most(printed, own):
    flags = ("--model", f"{own}:make", "--precision", "fp32")
    assert "update" not in printed(*flags).split("step on")[0]
    [rank] = json.loads(printed(*flags, "--device", "cpu", "--json"))["ranks"]
    # The root and the denominator of a weight, beside the denominator of the bias before it.
    held = rank["bytes"]
    assert held["update"] + held["activations"] + held["logits"] == 4 * (64 + 2 * 64 * 64)
    assert rank["peak_at"] == "update"
    *_, row = (line for line in printed(*flags, "--device", "cpu").splitlines() if "|" in line)
    assert row.split("|")[-1].strip() == "update"


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--model", "chain.py:without_sample"), "must return a model and a sample batch"),
        (("--model", "chain.py:make", "--sequence-length", "8"), "--sequence-length is for models of Hugging Face"),
        (("--model", "chain.py:make", "--task", "CausalLM"), "--task is for models of Hugging Face"),
    ],
)
def test_what_a_model_of_ones_own_lacks_is_refused(refused, own, flags, message):
    assert message in refused(*flags)


def test_a_schedule_is_searched_where_named_ones_need_too_much(printed, folder, refused):
    flags = ("--model", folder(LLAMA), "--pp-size", "2", "--num-microbatches", "4", "--sequence-length", "64")
    flags += ("--precision", "fp32")
    needed = json.loads(printed(*flags, "--json"))["peak_bytes"]
    limit = f"{int(0.93 * needed)}B"
    assert "hybridpp plan searches" in refused(*flags, "--memory", limit)
    text = printed(*flags, "--memory", limit, "--search-schedule", "best.csv")
    call = text.splitlines()[-1]
    assert call.startswith("HybridParallelPlugin(tp_size=1, pp_size=2, ")
    assert "schedule='best.csv'" in call
    assert "wrote best.csv" in text
    found = json.loads(printed(*flags, "--memory", limit, "--search-schedule", "best.csv", "--json"))
    assert found["peak_bytes"] <= 0.93 * needed


def test_a_search_for_what_is_no_pipeline_is_refused(refused, folder):
    model = folder(LLAMA)
    assert "--search-schedule is for pipelines" in refused("--model", model, "--search-schedule", "best.csv")
    assert "a .csv or .json file" in refused("--model", model, "--pp-size", "2", "--search-schedule", "best.txt")


def test_images_of_the_sample_count_and_what_it_lacks_is_told(printed, folder):
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    config = Gemma3Config(
        text_config={**sizes, "num_key_value_heads": 2, "vocab_size": 400, "head_dim": 16},
        vision_config={**sizes, "image_size": 56, "patch_size": 14, "vision_use_head": False},
        mm_tokens_per_image=4,
        image_token_index=300,
        architectures=["Gemma3ForConditionalGeneration"],
    )
    flags = ("--model", folder(config), "--sequence-length", "32")
    found = {images: json.loads(printed(*flags, "--images", images, "--json")) for images in ("0", "1", "2")}
    assert [one["notes"][0].partition(":")[2][:17] for one in found.values()] == [
        " none in the samp",
        " 4 of 32 tokens o",
        " 8 of 32 tokens o",
    ]
    first = [one["ranks"][0]["bytes"]["activations"] for one in found.values()]
    assert first[0] < first[1] < first[2]
    assert "images: 4 of 32 tokens of each sample, pixels 1 x 3 x 56 x 56\n" in printed(*flags)


def test_flux_is_estimated_from_its_configuration(printed, tmp_path):
    pytest.importorskip("diffusers")
    config = {
        "_class_name": "FluxTransformer2DModel",
        "attention_head_dim": 16,
        "axes_dims_rope": [4, 6, 6],
        "guidance_embeds": True,
        "in_channels": 4,
        "joint_attention_dim": 32,
        "num_attention_heads": 2,
        "num_layers": 2,
        "num_single_layers": 2,
        "pooled_projection_dim": 8,
    }
    (tmp_path / "flux").mkdir()
    (tmp_path / "flux" / "config.json").write_text(json.dumps(config))
    flags = ("--model", str(tmp_path / "flux"), "--sequence-length", "64", "--pp-size", "2", "--json")
    one, two = (json.loads(printed(*flags, "--microbatch-size", size)) for size in ("1", "2"))
    shared = json.loads(printed(*flags, "--tp-size", "2"))["ranks"][0]["bytes"]["weights"]
    assert shared < 0.8 * one["ranks"][0]["bytes"]["weights"]
    first, second = (found["ranks"][0]["bytes"]["activations"] for found in (one, two))
    assert 1.7 < second / first < 2.1


def test_what_diffusers_lacks_is_told(refused, tmp_path):
    pytest.importorskip("diffusers")
    (tmp_path / "config.json").write_text(json.dumps({"_class_name": "Unknown"}))
    assert "diffusers has no model 'Unknown'" in refused("--model", str(tmp_path))
    assert "--task is for models of transformers" in refused("--model", str(tmp_path), "--task", "CausalLM")


def test_without_diffusers_its_models_are_refused(refused, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "diffusers", None)
    (tmp_path / "config.json").write_text(json.dumps({"_class_name": "FluxTransformer2DModel"}))
    assert "which is not installed. Run pip install diffusers." in refused("--model", str(tmp_path))
