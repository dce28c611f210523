"""Every Python block of these pages runs, as a part of the README's script."""

import math
import re
from contextlib import chdir
from dataclasses import fields

import pytest
import torch
import torch.nn.functional as F
from support import ROOT, image_batch, model_loss, tiny_vit
from test_readme import blocks
from torch.optim.swa_utils import AveragedModel

import hybridpp
from hybridpp.cluster import Loopback
from hybridpp.config import (
    CompileConfig,
    LossScaleConfig,
    OptimizerConfig,
    ParallelConfig,
    PartitionConfig,
    PipelineConfig,
    PipelineGradientCheckpointConfig,
    PrecisionConfig,
)

PAGES = (
    "layouts",
    "compiling",
    "batches",
    "precision",
    "tensor_parallelism",
    "memory",
    "saving",
    "lora",
    "running",
    "report",
    "extending",
)
SNIPPETS = [
    pytest.param(page, block, id=f"{page}-{number}")
    for page in PAGES
    for number, block in enumerate(blocks(f"docs/{page}.md", "python"))
]
CONFIGS = (
    CompileConfig,
    LossScaleConfig,
    OptimizerConfig,
    ParallelConfig,
    PartitionConfig,
    PipelineConfig,
    PipelineGradientCheckpointConfig,
    PrecisionConfig,
)


class OnCpu(hybridpp.Booster):
    """A booster that stays on the CPU, where there is a CUDA device, too."""

    def __init__(self, plugin, **settings):
        super().__init__(plugin=plugin, device="cpu", **settings)


class SequenceFirst(torch.nn.Module):
    """A model with its samples in dimension 1, and a mask that they share."""

    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList([torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)])

    def forward(self, src, mask):
        for layer in self.layers:
            src = mask @ layer(src).flatten(1)
            src = src.unflatten(1, (-1, 4))
        return src


def script_names():
    """What the README's script has before it makes a plugin."""
    names = {name: getattr(hybridpp, name) for name in hybridpp.__all__}
    return names | {
        "torch": torch,
        "F": F,
        "AveragedModel": AveragedModel,
        "Booster": OnCpu,
        "coordinator": hybridpp.DistCoordinator(),
        "criterion": model_loss,
        "make_model": tiny_vit,
        "model": tiny_vit(),
        "sample": image_batch(2),
    }


def boosted_names():
    """What it has before it trains, on two replicas."""
    names = script_names()
    plugin = hybridpp.HybridParallelPlugin(tp_size=1, pp_size=1, num_microbatches=2, precision="fp32")
    booster = OnCpu(plugin)
    batch = image_batch(8)
    samples = [{name: tensor[row] for name, tensor in batch.items()} for row in range(8)]
    dataloader = plugin.prepare_dataloader(samples, batch_size=2)
    optimizer = hybridpp.HybridAdam(names["model"].parameters(), lr=1e-3)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=10)
    parts = booster.boost(names["model"], optimizer, model_loss, dataloader, schedule)
    return names | parts._asdict() | {"plugin": plugin, "booster": booster}


def train_with(names):
    """One step with the plugin of a snippet that shows its settings alone."""
    model, sample = names["model"], names["sample"]
    if "batch_dims" in names["block"]:
        model, sample = SequenceFirst(), {"src": torch.randn(3, 2, 4), "mask": torch.ones(3, 3).softmax(1)}
        names["criterion"] = lambda outputs: outputs.square().mean()
    optimizer = names.get("optimizer") or torch.optim.SGD(model.parameters(), lr=0.1)
    booster = OnCpu(names["plugin"])
    parts = booster.boost(model, optimizer, lr_scheduler=names.get("lr_scheduler"), sample=sample)
    loss = booster.execute_pipeline(iter([sample]), parts.model, names["criterion"], parts.optimizer)["loss"]
    parts.optimizer.step()
    assert loss.isfinite()


@pytest.mark.filterwarnings("ignore:tensor parallelism")
@pytest.mark.parametrize(("page", "block"), SNIPPETS)
def test_the_snippet_runs(tmp_path, page, block):
    makes_plugin = "HybridParallelPlugin(" in block

    def run():
        names = script_names() if makes_plugin else boosted_names()
        exec(block, names)
        if makes_plugin and "booster" not in names:
            train_with(names | {"block": block})

    (tmp_path / "outputs").mkdir()
    sizes = [int(size) for size in re.findall(r"[tp]p_size=(\d)", block)] if makes_plugin else [2]
    with chdir(tmp_path):
        Loopback(math.prod(sizes)).run(run)


def test_every_setting_is_on_a_page():
    pages = "".join(page.read_text() for page in [*(ROOT / "docs").glob("*.md"), ROOT / "README.md"])
    names = {field.name for config in CONFIGS for field in fields(config)} - {"loss_scale"}
    assert sorted(name for name in names if not re.search(rf"\b{name}\b", pages)) == []


def documented_defaults():
    """(page, setting, what its table says is the default) of settings whose default is a literal."""
    for page in (ROOT / "docs").glob("*.md"):
        for names, default in re.findall(
            r"^\| (`\w+`(?:, `\w+`)*)[^|]* \| ([^|:]*?)(?::[^|]*)? \|", page.read_text(), re.M
        ):
            values = re.split(r", | (?:MB|steps)\b", default.replace("`", ""))
            for name, value in zip(re.findall(r"\w+", names), values, strict=False):
                if re.fullmatch(r"None|True|False|\(\)|\"\w+\"|[\d.]+(\*\*\d+)?", value):
                    yield page.name, name, eval(value)


def test_defaults_on_the_pages_are_those_of_the_settings():
    defaults = {field.name: field.default for config in CONFIGS for field in fields(config)}
    documented = [(page, name, value) for page, name, value in documented_defaults() if name in defaults]
    assert len({name for _, name, _ in documented}) > 20
    assert [row for row in documented if row[2] != defaults[row[1]]] == []
