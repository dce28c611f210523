import re
from dataclasses import replace

import pytest
import torch
from torch import nn
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


class Whole(nn.Module):
    """Has nothing that is repeated, so it cannot be cut."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4, 4))

    def forward(self, x):
        return (x @ self.weight).relu()


def chosen(num_ranks, model, **more):
    def rank():
        plugin = HybridParallelPlugin.auto(model(), device="h100", **more)
        return plugin.tp_size, plugin.pp_size, plugin.dp_size

    (found,) = set(Loopback(num_ranks).run(rank))
    return found


def test_one_rank_has_one_layout():
    assert chosen(1, vit, global_batch=3) == (1, 1, 1)


def test_a_model_that_cannot_be_cut_gets_replicas():
    assert chosen(2, Whole, global_batch=4, sample=torch.ones(2, 4)) == (1, 1, 2)


def test_more_ranks_than_blocks_are_replicas_too():
    tp_size, pp_size, dp_size = chosen(6, vit, global_batch=12)
    assert tp_size * pp_size * dp_size == 6
    assert pp_size <= 4


def test_a_prime_number_of_ranks_divides_over_replicas_or_is_refused():
    assert chosen(5, vit, global_batch=10) == (1, 1, 5)

    def rank():
        message = "no layout of 5 devices divides a global batch of 12 samples.* Use a global batch of 15, which"
        with pytest.raises(ConfigError, match=message):
            HybridParallelPlugin.auto(vit(), global_batch=12, device="h100")
        return True

    assert all(Loopback(5).run(rank))


def test_a_batch_that_replicas_do_not_divide_goes_through_a_pipeline():
    assert chosen(2, vit, global_batch=3) in ((1, 2, 1), (2, 1, 1))


def test_what_needs_too_much_names_the_least_and_the_way_out():
    message = r"the nearest is .*, of which a rank needs [\d.]+ KiB, [\d.]+ KiB more\. Use more devices"
    with pytest.raises(ConfigError, match=message):
        chosen(1, vit, global_batch=2, memory="100KiB")
