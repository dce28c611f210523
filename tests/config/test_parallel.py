"""The layout: sizes of its axes, and how a model is cut."""

import pytest
from refusals import refused

from hybridpp.config import ParallelConfig, PartitionConfig


@pytest.mark.parametrize(
    ("cls", "settings", "text"),
    [
        (ParallelConfig, {"pp_size": 0}, "pp_size must be an integer of at least 1: got pp_size=0."),
        (ParallelConfig, {"pp_size": 2.0}, "pp_size must be an integer of at least 1: got pp_size=2.0."),
        (ParallelConfig, {"tp_size": -1}, "tp_size must be an integer of at least 1: got tp_size=-1."),
        (ParallelConfig, {"tp_size": "2"}, "tp_size must be an integer of at least 1: got tp_size='2'."),
        (
            ParallelConfig,
            {"tensor_parallel_plan": ["*.q_proj"]},
            "tensor_parallel_plan must be a dict from patterns of module names to styles, like {'*.q_proj': 'column', "
            "'*.o_proj': 'row'}: got ['*.q_proj'].",
        ),
        (
            PartitionConfig,
            {"layers_per_stage": 4},
            "layers_per_stage needs an integer of at least 1 for every stage: got 4.",
        ),
    ],
)
def test_refused_layouts(cls, settings, text):
    required = {"tp_size": 1, "pp_size": 1} if cls is ParallelConfig else {}
    with refused(text):
        cls(**{**required, **settings})


@pytest.mark.parametrize("name", ["tp_size", "pp_size"])
def test_a_bool_is_no_number_of_ranks(name):
    with refused(f"{name} must be an integer of at least 1: got {name}=True."):
        ParallelConfig(**{name: True})


@pytest.mark.parametrize(("world_size", "pp_size", "dp_size"), [(1, 1, 1), (4, 1, 4), (8, 2, 4), (6, 6, 1)])
def test_what_the_pipeline_leaves_is_replicas(world_size, pp_size, dp_size):
    assert ParallelConfig(tp_size=1, pp_size=pp_size).dp_size(world_size) == dp_size


@pytest.mark.parametrize(
    ("world_size", "advice"),
    [
        (6, "4 or 8 processes"),
        (1, "4 processes (torchrun --nproc-per-node 4 your_script.py)"),
        (9, "8 or 12 processes"),
    ],
)
def test_a_world_that_does_not_fit_names_the_nearest_sizes(world_size, advice):
    with refused(
        f"world size must be a multiple of tp_size * pp_size: got world_size={world_size}, tp_size=1, pp_size=4. "
        f"Start {advice}, or change the sizes."
    ):
        ParallelConfig(tp_size=1, pp_size=4).dp_size(world_size)
