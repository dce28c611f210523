import json
import re

import pytest
import torch
from transformers import (
    LlamaConfig,
    LongformerConfig,
    LongformerForMaskedLM,
    ViTConfig,
    ViTForImageClassification,
    Wav2Vec2Config,
    Wav2Vec2ForCTC,
)

from hybridpp import HybridParallelPlugin
from hybridpp.config import Precision
from hybridpp.errors import ConfigError
from hybridpp.estimate import DEVICES, DeviceProfile, EstimateInput, JobSizes

LLAMA = LlamaConfig(
    hidden_size=16,
    num_hidden_layers=4,
    num_attention_heads=2,
    num_key_value_heads=2,
    intermediate_size=32,
    vocab_size=50,
    architectures=["LlamaForCausalLM"],
)
SMALL = ("--devices", "4", "--global-batch", "8", "--sequence-length", "16", "--tp-sizes", "1", "--zero-stages", "0,1")
SMALL += ("--schedules", "1f1b,zb-v")


@pytest.fixture
def command():
    return "plan"


@pytest.fixture
def folder(tmp_path):
    LLAMA.save_pretrained(tmp_path / "model")
    return str(tmp_path / "model")


def test_the_table_ends_with_a_plugin_call_that_is_one(printed, folder):
    text = printed("--model", folder, *SMALL, "--top", "3")
    rows = [line.split("|") for line in text.splitlines() if re.match(r"\d", line) and "|" in line]
    assert [row[0].strip() for row in rows] == ["1", "2", "3"]
    titles = next(line for line in text.splitlines() if "tp,pp,dp" in line)
    at = [title.strip() for title in titles.split("|")].index("ms")
    times = [float(row[at].replace(",", "")) for row in rows]
    assert times == sorted(times)
    call = text.splitlines()[-1]
    assert call.startswith("HybridParallelPlugin(tp_size=1, pp_size=")
    keywords = eval(call.replace("HybridParallelPlugin", "dict"))
    if keywords["pp_size"] == 1:
        assert HybridParallelPlugin(**keywords).precision == "bf16"


def test_json_has_the_settings_of_each(printed, folder):
    found = json.loads(printed("--model", folder, *SMALL, "--top", "2", "--json"))
    assert len(found["best"]) == 2
    for one in found["best"]:
        assert one["dp_size"] * one["settings"]["pp_size"] == 4
        assert one["global_batch"] == 8


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ((*SMALL, "--memory", "1KiB"), "no layout of 4 devices fits in"),
        (
            ("--devices", "4", "--global-batch", "3", "--tp-sizes", "1", "--pp-sizes", "1"),
            "divides a global batch of 3",
        ),
        ((*SMALL, "--zero-stages", "4"), "zero_stage must be 0, 1, 2 or 3: got '4'. Separate several by commas"),
        ((*SMALL, "--pp-sizes", "1,x"), "--pp-sizes takes integers of at least 1, separated by commas: got 'x'."),
        ((*SMALL, "--schedules", "2f2b"), "unknown schedule '2f2b'"),
    ],
)
def test_what_cannot_be_is_refused(refused, folder, flags, message):
    assert message in refused("--model", folder, *flags)


def test_a_model_of_ones_own_is_planned(printed, tmp_path):
    (tmp_path / "chain.py").write_text(OWN)
    flags = ("--devices", "2", "--global-batch", "4", "--tp-sizes", "1", "--zero-stages", "0", "--no-recompute")
    found = json.loads(printed("--model", "chain.py:make", *flags, "--json"))
    assert {one["settings"]["pp_size"] for one in found["best"]} == {1, 2}


def test_a_searched_schedule_is_faster_or_the_plan_says_that_none_is(printed, folder):
    flags = ("--model", folder, *SMALL, "--pp-sizes", "2", "--schedules", "gpipe", "--no-recompute")
    slowest = json.loads(printed(*flags, "--top", "1", "--json"))["best"][0]["time"]["step_ms"]
    text = printed(*flags, "--top", "2", "--search-schedule", "best.csv")
    assert "wrote best.csv" in text
    assert "schedule='best.csv'" in text
    found = json.loads(printed(*flags, "--top", "1", "--search-schedule", "best.csv", "--json"))["best"][0]
    assert found["time"]["step_ms"] < slowest
    one_stage = ("--model", folder, *SMALL, "--pp-sizes", "1", "--search-schedule", "best.csv")
    assert "no schedule that was searched is faster" in printed(*one_stage)


OWN = """
import torch
from torch import nn


def make():
    return nn.Sequential(*[nn.Sequential(nn.Linear(64, 64), nn.ReLU()) for _ in range(4)]), torch.randn(2, 64)
"""


def vit():
    sizes = {"hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 128}
    return ViTForImageClassification(ViTConfig(image_size=64, patch_size=16, num_labels=10, **sizes))


def longformer():
    """Of one sample it adds biases in products, of more it copies what products read."""
    sizes = {"hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 128}
    return LongformerForMaskedLM(LongformerConfig(vocab_size=200, attention_window=16, **sizes))


@pytest.mark.parametrize(("make", "tp_size"), [(vit, 2), (longformer, 1)])
def test_many_samples_are_estimated_as_if_they_had_run(make, tp_size):
    """On a device so slow that what limits an operator changes between one sample and sixteen."""
    slow = DeviceProfile(
        name="slow",
        memory_gib=80,
        tflops={"fp32": 0.1},
        memory_gib_s=50,
        op_us=0.0,
        host_us=0.1,
        host_gib_s=50,
        network_gib_s=50,
    )
    given = EstimateInput(precision=Precision.BF16, device=slow, sequence_length=32)
    with torch.device("meta"):
        model = make()
    estimator = HybridParallelPlugin.layout_estimator(model, given)
    settings = {"tp_size": tp_size, "pp_size": 2, "schedule": "1f1b"}
    for size in (4, 16):
        sizes = JobSizes(world_size=2 * tp_size, microbatch_size=size, num_microbatches=4)
        quick = estimator.quick_estimate(sizes, settings, 80 * 2**30)
        complete = estimator.estimate(sizes, settings)
        assert quick.time.step_ms == pytest.approx(complete.time.step_ms, rel=0.002)
        assert quick.worst.total == pytest.approx(complete.worst.total, rel=0.03)


class Pooled(torch.nn.Module):
    """Normalises one number of each sample and channel by their statistics, which one sample has none of."""

    def __init__(self):
        super().__init__()
        self.blocks = torch.nn.Sequential(*(torch.nn.Linear(16, 16) for _ in range(4)))
        self.norm = torch.nn.BatchNorm1d(16)

    def forward(self, x):
        return self.norm(self.blocks(x).mean(1))


def apart(outputs, inputs):
    """How far the samples of a micro-batch are from each other."""
    if len(outputs) == 1:
        raise ValueError("Expected more than 1 sample")
    return torch.pdist(outputs.flatten(1)).mean()


@pytest.mark.parametrize(("make", "criterion"), [(Pooled, None), (lambda: Pooled().blocks, apart)])
def test_what_runs_on_no_single_sample_is_planned_with_larger_batches(make, criterion):
    given = EstimateInput(
        precision=Precision.BF16, device=DEVICES["h100"], sample=torch.randn(2, 5, 16), criterion=criterion
    )
    estimator = HybridParallelPlugin.layout_estimator(make(), given)
    settings = {"tp_size": 1, "pp_size": 2, "schedule": "1f1b"}
    with pytest.raises(
        ConfigError,
        match=r"(Pooled|Sequential) does not run on a micro-batch of 1 sample: .*\. Use larger micro-batches\.$",
    ):
        estimator.quick_estimate(JobSizes(world_size=2, microbatch_size=1, num_microbatches=4), settings, 2**30)
    for size in (2, 3, 8):
        sizes = JobSizes(world_size=2, microbatch_size=size, num_microbatches=4)
        quick, complete = estimator.quick_estimate(sizes, settings, 2**30), estimator.estimate(sizes, settings)
        assert quick.time.step_ms == pytest.approx(complete.time.step_ms, rel=0.01)
        for rank, expected in zip(quick.ranks, complete.ranks, strict=True):
            assert rank.total - rank.step.messages == pytest.approx(expected.total - expected.step.messages, rel=0.05)
            # At their most.
            assert expected.step.messages <= rank.step.messages <= 4 * max(expected.step.messages, size * 5 * 16 * 2)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # of fakes, in the trace
def test_recordings_get_labels_for_each_of_many_samples():
    """The loss takes a list of labels for one sample as its sequence."""
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    config = Wav2Vec2Config(vocab_size=20, layerdrop=0.0, apply_spec_augment=False, num_conv_pos_embeddings=16, **sizes)
    with torch.device("meta"):
        model = Wav2Vec2ForCTC(config)
    estimator = HybridParallelPlugin.layout_estimator(
        model, EstimateInput(precision=Precision.BF16, device=DEVICES["h100"])
    )
    settings = {"tp_size": 1, "pp_size": 2, "schedule": "1f1b"}
    totals = [
        estimator.quick_estimate(
            JobSizes(world_size=2, microbatch_size=size, num_microbatches=4), settings, 2**36
        ).worst.total
        for size in (1, 8)
    ]
    assert 4 * totals[0] < totals[1] < 8 * totals[0]
