"""A stage hands what its backward pass needs to the caller, and keeps nothing of a micro-batch itself."""

import torch
from support import assert_same, image_batch, tiny_vit

from hybridpp.config import PipelineGradientCheckpointConfig
from hybridpp.module_adapter import ModuleAdapter
from hybridpp.partition import StagedModel, StagingOptions

CPU = torch.device("cpu")


def test_two_forwards_of_one_microbatch_may_wait_for_their_backwards():
    model, batch = tiny_vit(0.5, num_layers=2), image_batch(2)
    staging = StagingOptions(recomputation=PipelineGradientCheckpointConfig(gradient_checkpointing_ratio=1.0))
    staged = StagedModel(ModuleAdapter(model), 1, [0], device=CPU, samples=[], staging=staging)
    (plan,) = staged.plans((), batch).values()
    runs = [staged.forward(plan, (), batch, [], 7, True) for _ in range(2)]
    gradients = []
    for _, outputs, context in runs:
        with staged.recomputing(context):
            outputs.loss.backward()
        gradients.append({name: parameter.grad for name, parameter in model.named_parameters()})
        model.zero_grad()
    assert_same(*gradients)


def test_a_forward_without_gradients_leaves_nothing_to_recompute():
    model, batch = tiny_vit(num_layers=2), image_batch(2)
    staged = StagedModel(ModuleAdapter(model), 1, [0], device=CPU, samples=[])
    (plan,) = staged.plans((), batch).values()
    with torch.no_grad():
        assert staged.forward(plan, (), batch, [], 7, False)[2] is None
