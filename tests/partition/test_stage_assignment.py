"""Stages keep what they were given: inputs that need it elsewhere are refused, and too large a share is told."""

import re

import pytest
import torch
from container_code_models import Blocks
from networks import Convolutions, wide_images
from partition.tracing import CPU
from support import boosted, sgd

from hybridpp.cluster import Loopback
from hybridpp.config import PartitionConfig
from hybridpp.errors import PartitionError
from hybridpp.module_adapter import ModuleAdapter
from hybridpp.partition import StagedModel, StagingOptions, TrainingStateSpec


class Reader(Blocks):
    """Another way through the blocks for wider batches."""

    def forward(self, x):
        first, last = (0, 3) if len(x) < 4 else (3, 0)
        return self.head(self.blocks[last](self.blocks[2](self.blocks[1](self.blocks[first](self.embed(x))))))


def test_an_input_that_needs_a_parameter_elsewhere():
    model = Reader()
    staged = StagedModel(ModuleAdapter(model), 2, [0], device=CPU, samples=[((torch.ones(2, 4),), {})])
    text = (
        "for this input, stage 0 needs parameter 'blocks.3.weight', which was given to stage 1 at boost. "
        "Boost with a sample that uses it there."
    )
    with pytest.raises(PartitionError, match=f"^{re.escape(text)}$"):
        staged.plans((torch.ones(4, 4),), {})


def test_a_model_that_is_not_cut_is_held_to_the_memory_limit_too():
    staging = StagingOptions(partition=PartitionConfig(memory_limit=300_000), state_spec=TrainingStateSpec(2))
    with pytest.raises(PartitionError, match=r"the parameters of stage 0 \(rank 0 of the pipeline\) take"):
        StagedModel(ModuleAdapter(Convolutions()), 1, [0], device=torch.device("cpu"), samples=[], staging=staging)


def test_a_stage_with_far_more_than_its_share_of_parameters_is_named(caplog):
    def boost(**settings):
        caplog.clear()
        with caplog.at_level("WARNING", logger="hybridpp"):
            Loopback(4).run(lambda: boosted(Convolutions(), sgd, wide_images(), pp_size=4, **settings))
        return [record.getMessage() for record in caplog.records]

    (said,) = boost()
    assert said.endswith(
        "stage 3 of Convolutions holds 3.6 times as many parameters as the mean of the 4 stages, because that balances "
        'flops best. Where memory is short, use balance="parameters", memory_limit= or layers_per_stage=.'
    )
    assert boost(balance="parameters") == boost(layers_per_stage=[2, 2, 2, 2]) == []
