"""The bytes that a rank says it holds are those of its tensors."""

from functools import partial

import pytest
import torch
from hybridpp_plugins.held_state import held_bytes
from support import boosted, image_batch, model_loss, tiny_vit
from torch import nn

from hybridpp.cluster import Loopback

NUM_WEIGHTS = sum(parameter.numel() for parameter in tiny_vit().parameters())


def held(**settings):
    adam = partial(torch.optim.AdamW, lr=1e-3)
    booster, model, optimizer = boosted(tiny_vit(), adam, image_batch(4), **settings)
    booster.execute_pipeline(iter([image_batch(4)]), model, model_loss, optimizer)
    optimizer.step()
    return held_bytes(booster.plugin._engine(model))


def near(num_bytes):
    # Buckets have padding, and Adam counts its steps in a tensor of 4 bytes for each parameter.
    return pytest.approx(num_bytes, rel=0.02, abs=2000)


def test_one_rank_in_fp32_holds_four_times_its_weights():
    found = held()
    assert found["weights"] == 4 * NUM_WEIGHTS
    assert found["gradients"] == near(4 * NUM_WEIGHTS)
    assert found["moments"] == near(8 * NUM_WEIGHTS)
    assert found["masters"] == found["host"] == 0


def test_half_precision_has_masters():
    found = held(precision="bf16")
    assert found["masters"] == 4 * NUM_WEIGHTS
    assert 2 * NUM_WEIGHTS <= found["weights"] < 2.3 * NUM_WEIGHTS, "norms stay in fp32"


def test_ranks_of_a_pipeline_and_of_tensor_parallelism_hold_their_parts():
    ranks = Loopback(4).run(partial(held, pp_size=2, tp_size=2, num_microbatches=2))
    total = sum(rank["weights"] for rank in ranks)
    # Norms, embeddings and biases of rows are whole on each of the ranks that share layers.
    assert 4 * NUM_WEIGHTS < total < 5.5 * NUM_WEIGHTS
    assert all(rank["moments"] == near(2 * rank["weights"]) for rank in ranks)


class Blocks(nn.Module):
    """Blocks that are large beside the padding of buckets."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(128, 128), nn.Linear(128, 128)) for _ in range(4)])

    def forward(self, x):
        for block in self.blocks:
            x = x + block(x)
        return x


@pytest.mark.parametrize(
    ("zero_stage", "divided"),
    [(1, ("moments",)), (2, ("moments", "gradients")), (3, ("moments", "gradients", "weights"))],
)
def test_what_zero_divides_is_half_as_large_on_two_replicas(zero_stage, divided):
    def run():
        torch.manual_seed(0)
        booster, model, optimizer = boosted(Blocks(), torch.optim.AdamW, torch.ones(4, 128), zero_stage=zero_stage)
        batch = torch.full((4, 128), 1.0 + booster.plugin.layout.here.dp)
        booster.execute_pipeline(iter([batch]), model, lambda outputs, inputs: outputs.square().mean(), optimizer)
        optimizer.step()
        return held_bytes(booster.plugin._engine(model))

    ranks = Loopback(2).run(run)
    num_weights = sum(parameter.numel() for parameter in Blocks().parameters())
    for name, factor in {"weights": 4, "gradients": 4, "moments": 8}.items():
        whole = factor * num_weights
        least = whole / 2 if name in divided else whole
        # Segments of buckets are padded, and parameters are not all divided in the middle.
        assert all(0.98 * least < held[name] < least + 0.15 * whole for held in ranks), name
