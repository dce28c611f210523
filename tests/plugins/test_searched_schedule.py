"""A schedule that a search found trains as one process does, and what it recomputes is not held."""

import gc

import pytest
import torch
from transformers import ViTConfig, ViTForImageClassification

from hybridpp import Booster, HybridParallelPlugin
from hybridpp.cluster import Loopback
from hybridpp.estimate import AllocationLog
from hybridpp.simulate import Costs, search_schedule

NUM_MICROBATCHES, NUM_BLOCKS = 4, 4


def vit():
    torch.manual_seed(0)
    config = ViTConfig(
        hidden_size=32,
        num_hidden_layers=NUM_BLOCKS,
        num_attention_heads=2,
        intermediate_size=256,
        image_size=16,
        patch_size=4,
        num_labels=5,
    )
    return ViTForImageClassification(config).train()


def images():
    generator = torch.Generator().manual_seed(1)
    labels = torch.arange(2 * NUM_MICROBATCHES) % 5
    return {"pixel_values": torch.randn(len(labels), 3, 16, 16, generator=generator), "labels": labels}


def trained(num_ranks, **settings):
    """Loss, gradients by name and the peak of bytes of each rank in the second step."""

    def rank():
        with AllocationLog() as log:
            model = vit()
            booster = Booster(plugin=HybridParallelPlugin(num_microbatches=NUM_MICROBATCHES, **settings), device="cpu")
            optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
            sample = {name: tensor[:2] for name, tensor in images().items()}
            parts = booster.boost(model, optimizer, lambda outputs, inputs: outputs.loss, sample=sample)
            for step in range(2):
                if step:
                    gc.collect()
                    log.peak = log.now
                loss = booster.execute_pipeline(iter([images()]), parts.model, parts.criterion, parts.optimizer)["loss"]
                gradients = {name: one.grad.clone() for name, one in model.named_parameters() if one.grad is not None}
                parts.optimizer.step()
        return float(loss), gradients, log.peak

    return Loopback(num_ranks).run(rank)


def test_a_searched_schedule_that_recomputes_trains_the_same():
    costs = Costs(num_stages=2, forward_ms=(1.0, 1.4), activation_bytes=1024, recompute_ms=0.4, recomputed_bytes=64)
    found = search_schedule(costs, num_ranks=2, num_microbatches=NUM_MICROBATCHES, memory_bytes=1536)
    assert 0 in found.recomputed_stages
    counts = [NUM_BLOCKS // 2 * (stage in found.recomputed_stages) for stage in range(2)]
    searched = {"pp_size": 2, "schedule": found.programs}
    recomputing = trained(2, **searched, gradient_checkpoint_config={"num_ckpt_layers_per_stage": counts})
    holding = trained(2, **searched)
    ((loss, expected, _),) = trained(1)
    gradients = {name: gradient for _, own, _ in recomputing for name, gradient in own.items()}
    assert gradients.keys() == expected.keys()
    for name, gradient in gradients.items():
        torch.testing.assert_close(gradient, expected[name], rtol=0, atol=0)
    assert [own for own, _, _ in recomputing] == [pytest.approx(loss)] * 2
    for stage, (less, more) in enumerate(zip(recomputing, holding, strict=True)):
        if stage in found.recomputed_stages:
            assert less[2] < 0.95 * more[2]
