"""Which modules count as norms, by their class and what is in them."""

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextRMSNormGated
from transformers.models.t5.modeling_t5 import T5LayerNorm

from hybridpp.precision import norm_modules


def named(name, base=nn.Module, *args, **parts):
    """A module of a class that is called so."""
    module = type(name, (base,), {})(*args)
    for part, value in parts.items():
        setattr(module, part, value)
    return module


WEIGHT = nn.Parameter(torch.ones(4))


@pytest.mark.parametrize(
    "module",
    [
        nn.LayerNorm(4),
        nn.GroupNorm(2, 4),
        nn.RMSNorm(4),
        nn.InstanceNorm2d(4),
        nn.LocalResponseNorm(2),
        LlamaRMSNorm(4),
        T5LayerNorm(4),
        Qwen3NextRMSNormGated(4),
        named("BitGroupNormActivation", nn.GroupNorm, 2, 4),
        *(
            named(name, weight=WEIGHT)
            for name in (
                "LayerNorm2d",
                "NemotronLayerNorm1P",
                "rmsnorm",
                "Layer_norm",
                "FrozenBatchNorm2d",
                "GatedNorm",
            )
        ),
        named("LayerNormalization", weight=WEIGHT),
        named("StreamingLayerNorm", ln=nn.LayerNorm(4, elementwise_affine=False), gamma=WEIGHT),
        named("L2Norm"),
    ],
    ids=lambda module: type(module).__name__,
)
def test_norms(module):
    assert module in norm_modules(nn.Sequential(module))


@pytest.mark.parametrize(
    "module",
    [
        nn.BatchNorm2d(4),
        nn.SyncBatchNorm(4),
        named("NormedEmbedding", nn.Embedding, 4, 4),
        named("WeightNorm", nn.Linear, 4, 4),
        named("SurfaceNormal", weight=WEIGHT),
        named("Normalizer", weight=WEIGHT),
        named("LayerNormLinear", weight=WEIGHT),
        parametrizations.weight_norm(nn.Linear(4, 4)),
        parametrizations.spectral_norm(nn.Linear(4, 4)),
    ],
    ids=lambda module: type(module).__name__,
)
def test_no_norms(module):
    assert not norm_modules(nn.Sequential(module))


def test_of_a_sublayer_with_its_norm_only_the_norm_counts():
    norm = nn.LayerNorm(4)
    assert norm_modules(nn.Sequential(named("PreNorm", norm=norm, fn=nn.Linear(4, 4)))) == {norm}


def test_a_norm_that_shares_its_weight_with_another_layer_does_not_count():
    first, second = nn.LayerNorm(4), nn.RMSNorm(4)
    second.weight = nn.Parameter(torch.ones(4))
    assert norm_modules(nn.Sequential(first, second, named("Scale", scale=second.weight))) == {first}
    second.weight = first.weight
    assert norm_modules(nn.Sequential(first, second)) == {first, second}
