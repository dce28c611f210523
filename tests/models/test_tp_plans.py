"""Inferred plans for some of the architectures that everyone knows; for all of them: ``tests/models/tp_plans.py``."""

import copy

import pytest
import torch
from models.tp_plans import compare, infer, share, step
from models.zoo import architectures, build

from hybridpp.cluster import Loopback, current_world
from hybridpp.tensor_parallel import placement_of, shard

KNOWN = (
    "vit",
    "bert",
    "llama",
    "gpt2",
    "opt",
    "bloom",
    "falcon",
    "gpt_neox",
    "mixtral",
    "t5",
    "whisper",
    "deepseek_v3",
)


# What torch and transformers warn about is theirs.
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", KNOWN)
def test_blocks_are_divided_and_gradients_stay_what_they_are(name):
    architecture = next(found for found in architectures() if found.name == name)
    specimen = build(architecture)
    blocks, found = infer(specimen, 2)
    assert compare(specimen, found, 2) == []
    assert share(specimen, blocks, found, 2) < 0.56


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["vit", "gpt2", "llama", "qwen3", "bloom", "t5"])
def test_plans_of_styles_alone_can_be_applied_as_they_are(name):
    specimen = build(next(found for found in architectures() if found.name == name))
    plan = infer(specimen, 2, styles_only=True)[1].plan
    loss, whole = step(copy.deepcopy(specimen.model), specimen.batch)

    def run():
        model = copy.deepcopy(specimen.model)
        summed = shard(model, plan, current_world().split([range(2)])).summed
        own, gradients = step(model, specimen.batch)
        assert own == pytest.approx(loss, rel=1e-5)
        return gradients, {key: placement_of(parameter) for key, parameter in model.named_parameters()}, summed

    ranks = Loopback(2).run(run)
    _, placements, summed = ranks[0]
    assert any(placements.values())
    for key, expected in whole.items():
        parts = [gradients[key] for gradients, *_ in ranks]
        if placements[key] is not None:
            parts = [placements[key].join(parts)]
        elif key in summed:
            parts = [parts[0] + parts[1]]
        for found in parts:
            assert torch.allclose(found, expected, atol=1e-6, rtol=1e-4), key
