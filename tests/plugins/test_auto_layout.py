import re
from dataclasses import replace

import pytest
import torch
from transformers import ViTConfig, ViTForImageClassification

from hybridpp import Booster, HybridParallelPlugin
from hybridpp.cluster import Loopback
from hybridpp.errors import ConfigError
from hybridpp.estimate import DEVICES

SIZES = {"hidden_size": 16, "num_hidden_layers": 4, "num_attention_heads": 2, "intermediate_size": 32}


def vit():
    torch.manual_seed(0)
    return ViTForImageClassification(ViTConfig(**SIZES, image_size=8, patch_size=4, num_labels=5))


def test_every_rank_gets_the_same_layout_and_trains():
    # Ranks that a fast link does not join: replicas send more than a pipeline does.
    device = replace(DEVICES["h100"], devices_per_host=1, network_gib_s=1e-4, host_us=0.0, message_us=0.0)
    batch = {"pixel_values": torch.zeros(4, 3, 8, 8), "labels": torch.zeros(4, dtype=torch.long)}

    def rank():
        model = vit()
        plugin = HybridParallelPlugin.auto(model, global_batch=4, device=device, max_norm=1.0)
        booster = Booster(plugin=plugin, device="cpu")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        parts = booster.boost(model, optimizer, lambda outputs, inputs: outputs.loss, sample=batch)
        result = booster.execute_pipeline(iter([batch]), parts.model, parts.criterion, parts.optimizer)
        parts.optimizer.step()
        return plugin.tp_size, plugin.pp_size, plugin.dp_size, plugin.max_norm, float(result["loss"])

    first, second = Loopback(2).run(rank)
    assert first == second
    assert first[:4] == (1, 2, 1, 1.0)


def test_what_is_chosen_cannot_be_given():
    with pytest.raises(ConfigError, match=re.escape("got pp_size. Leave it out")):
        HybridParallelPlugin.auto(vit(), global_batch=4, pp_size=2)


def test_what_does_not_fit_is_refused_on_every_rank():
    def rank():
        with pytest.raises(ConfigError, match="no layout of 2 devices fits in"):
            HybridParallelPlugin.auto(vit(), global_batch=4, memory="1KiB")
        return True

    assert Loopback(2).run(rank) == [True, True]
