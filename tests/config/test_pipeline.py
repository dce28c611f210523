"""Numbers of microbatches, and what is recomputed."""

import pytest
from refusals import refused

from hybridpp.config import PipelineConfig, PipelineGradientCheckpointConfig


@pytest.mark.parametrize(
    ("cls", "settings", "text"),
    [
        (
            PipelineConfig,
            {},
            "give exactly one of num_microbatches and microbatch_size: got num_microbatches=None, "
            "microbatch_size=None. For example, pass num_microbatches=8: more micro-batches than stages keep the "
            "stages busy.",
        ),
        (
            PipelineConfig,
            {"num_microbatches": 2, "microbatch_size": 3},
            "give exactly one of num_microbatches and microbatch_size: got num_microbatches=2, microbatch_size=3. "
            "For example, pass num_microbatches=8: more micro-batches than stages keep the stages busy.",
        ),
        (
            PipelineConfig,
            {"num_microbatches": 0},
            "num_microbatches must be an integer of at least 1: got num_microbatches=0.",
        ),
        (
            PipelineConfig,
            {"num_microbatches": 10**30},
            f"num_microbatches must be at most {2**17}, as a schedule is planned action by action: got "
            f"num_microbatches={10**30}. Use fewer, of more samples each.",
        ),
        (
            PipelineConfig,
            {"microbatch_size": 1.5},
            "microbatch_size must be an integer of at least 1: got microbatch_size=1.5.",
        ),
    ],
)
def test_refused_numbers_of_microbatches(cls, settings, text):
    with refused(text):
        cls(**settings)


@pytest.mark.parametrize("name", ["num_microbatches", "microbatch_size"])
def test_a_bool_is_no_number_of_microbatches(name):
    with refused(f"{name} must be an integer of at least 1: got {name}=True."):
        PipelineConfig(**{name: True})


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        (
            {"gradient_checkpointing_ratio": 0.5, "num_ckpt_layers_per_stage": [1, 2]},
            "give gradient_checkpointing_ratio or num_ckpt_layers_per_stage, not both: got 0.5 and [1, 2].",
        ),
        (
            {"gradient_checkpointing_ratio": 1.5},
            "gradient_checkpointing_ratio must be from 0 to 1: got gradient_checkpointing_ratio=1.5.",
        ),
        (
            {"num_ckpt_layers_per_stage": [1, -1]},
            "num_ckpt_layers_per_stage needs an integer of at least 0 for every stage: got [1, -1].",
        ),
        (
            {"num_ckpt_layers_per_stage": 3},
            "num_ckpt_layers_per_stage needs an integer of at least 0 for every stage: got 3.",
        ),
        (
            {"max_stored_microbatches": -1},
            "max_stored_microbatches must be an integer of at least 0, or None: got max_stored_microbatches=-1.",
        ),
    ],
)
def test_what_is_recomputed_is_checked_however_it_is_given(settings, text):
    with refused(text):
        PipelineGradientCheckpointConfig(**settings)
    with refused(text):
        PipelineConfig(num_microbatches=1, gradient_checkpoint_config=settings)


@pytest.mark.parametrize("given", [True, {"ratio": 0.5}])
def test_what_says_nothing_about_recomputing_is_refused(given):
    with refused(
        "gradient_checkpoint_config must be a PipelineGradientCheckpointConfig, or a dict of "
        "gradient_checkpointing_ratio, "
        f"num_ckpt_layers_per_stage, max_stored_microbatches: got {given!r}."
    ):
        PipelineConfig(num_microbatches=1, gradient_checkpoint_config=given)


@pytest.mark.parametrize(
    ("settings", "counts"),
    [
        ({}, [7, 7]),
        ({"gradient_checkpointing_ratio": 0.5}, [3, 3]),
        ({"gradient_checkpointing_ratio": 0}, [0, 0]),
        ({"num_ckpt_layers_per_stage": (2, 0)}, [2, 0]),
        ({"max_stored_microbatches": 0}, [7, 7]),
    ],
)
def test_how_many_blocks_are_recomputed(settings, counts):
    config = PipelineGradientCheckpointConfig(**settings)
    assert [config.num_recomputed(stage, 7) for stage in range(2)] == counts
    assert PipelineGradientCheckpointConfig(gradient_checkpointing_ratio=0.29).num_recomputed(0, 100) == 29


@pytest.mark.parametrize(
    ("settings", "schedule"),
    [
        ({}, "1f1b"),
        ({"num_model_chunks": 1}, "1f1b"),
        ({"num_model_chunks": 2}, "interleaved"),
        ({"num_model_chunks": 2, "schedule": "gpipe"}, "gpipe"),
        ({"num_model_chunks": 2, "schedule": "1f1b"}, "1f1b"),
    ],
)
def test_the_schedule_where_stages_per_rank_are_given(settings, schedule):
    assert PipelineConfig(num_microbatches=4, **settings).schedule == schedule
