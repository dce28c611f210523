"""A rank holds its part of a model, in the dtype that it computes in, and masters of that part alone."""

import pytest
import torch
from divided_models import VIT
from support import assert_near, boosted, image_batch, model_loss, sgd, tiny_vit, train

from hybridpp.cluster import Loopback


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_a_rank_has_masters_of_what_it_owns_and_of_nothing_else(precision):
    """Of tp2 x pp2: its stage's parameters, of divided layers its part, and optimizer state of these."""

    def run():
        settings = {"tp_size": 2, "pp_size": 2, "tensor_parallel_plan": VIT, "precision": precision}
        booster, model, optimizer = boosted(tiny_vit(), torch.optim.AdamW, image_batch(2), **settings)
        booster.execute_pipeline(iter([image_batch(4)]), model, model_loss, optimizer)
        optimizer.step()
        masters = booster.plugin._engine(model).masters.masters
        shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
        assert {name: master.shape for name, master in masters.items()} == shapes
        assert {master.dtype for master in masters.values()} == {torch.float32}
        held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        assert held == {id(master) for master in masters.values()} == set(map(id, optimizer.state))
        return sum(master.numel() for name, master in masters.items() if ".layers." in name)

    whole = sum(parameter.numel() for name, parameter in tiny_vit().named_parameters() if ".layers." in name)
    for counted in Loopback(4).run(run):
        # Two of four layers; norms and biases of row layers are whole on both ranks that share them.
        assert 0.25 * whole < counted < 0.28 * whole


def test_a_model_loaded_in_half_precision_is_widened_for_fp32():
    def run():
        booster, model, optimizer = boosted(tiny_vit().to(torch.bfloat16), sgd, image_batch(2), pp_size=2)
        booster.execute_pipeline(iter([image_batch(4)]), model, model_loss, optimizer)
        return {parameter.dtype for parameter in model.parameters()}

    assert Loopback(2).run(run) == [{torch.float32}] * 2


def test_float64_models_train_in_float64():
    batches = [
        {name: value.double() if value.is_floating_point() else value for name, value in batch.items()}
        for batch in [image_batch(8, seed) for seed in range(2)]
    ]
    one = train(lambda: tiny_vit().double(), batches, num_microbatches=2)
    two = train(lambda: tiny_vit().double(), batches, num_microbatches=2, pp_size=2, dp_size=2)
    assert_near(two["weights"], one["weights"], 1e-14)
