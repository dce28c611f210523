"""Inferred plans for some of the architectures that everyone knows; for all of them: ``tests/models/tp_plans.py``."""

import pytest
from models.tp_plans import compare, infer, share
from models.zoo import architectures, build

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
