"""Scripts written for other libraries: their settings, at their defaults, are taken; others are refused by name."""

import re

import pytest
from torch import nn
from torch.utils.data import DistributedSampler

from hybridpp import HybridParallelPlugin
from hybridpp.cluster import Loopback
from hybridpp.config import PartitionConfig
from hybridpp.errors import ConfigError
from hybridpp.partition import annotate_split_points

# Everything that Colossal-AI's HybridParallelPlugin and MoeHybridParallelPlugin take, with their defaults.
DEFAULTS = {
    "sp_size": None,
    "ep_size": 1,
    "precision": "fp16",
    "zero_stage": 0,
    "enable_all_optimization": False,
    "enable_fused_normalization": False,
    "enable_flash_attention": False,
    "enable_jit_fused": False,
    "enable_sequence_parallelism": False,
    "sequence_parallelism_mode": None,
    "parallel_output": True,
    "num_microbatches": 1,
    "microbatch_size": None,
    "initial_scale": 2**16,
    "min_scale": 1,
    "growth_factor": 2,
    "backoff_factor": 0.5,
    "growth_interval": 1000,
    "hysteresis": 2,
    "max_scale": 2**32,
    "max_norm": 0,
    "broadcast_buffers": True,
    "ddp_bucket_cap_mb": 25,
    "find_unused_parameters": False,
    "check_reduction": False,
    "gradient_as_bucket_view": False,
    "static_graph": False,
    "zero_bucket_size_in_m": 12,
    "cpu_offload": False,
    "communication_dtype": None,
    "overlap_communication": True,
    "custom_policy": None,
    "pp_style": "1f1b",
    "num_model_chunks": 1,
    "scheduler_nodes": None,
    "num_layers_per_stage": None,
    "gradient_checkpoint_config": None,
    "enable_metadata_cache": True,
    "make_vocab_size_divisible_by": 64,
    "dp_outside": True,
    "moe_dp_outside": True,
    "overlap_p2p": True,
    "overlap_allgather": False,
    "fp8_communication": False,
    "use_fp8": False,
    "inner_ring_size": None,
}
GOOD = {"tp_size": 1, "pp_size": 1, "num_microbatches": 1, "precision": "fp32"}


def test_every_setting_at_its_default_is_taken():
    plugin = HybridParallelPlugin(tp_size=1, pp_size=1, **DEFAULTS)
    assert (plugin.precision, plugin.sp_size, plugin.sp_group) == ("fp16", 1, None)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("sp_size", 1),
        ("parallel_output", False),
        ("check_reduction", True),
        ("enable_metadata_cache", False),
        ("overlap_communication", False),
        ("overlap_p2p", False),
        ("make_vocab_size_divisible_by", None),
        ("zero_bucket_size_in_m", None),
        ("zero_bucket_size_in_m", 24),
        ("enable_fused_normalization", True),
        ("enable_flash_attention", True),
        ("enable_jit_fused", True),
    ],
)
def test_other_values_that_ask_for_nothing_are_taken(name, value):
    HybridParallelPlugin(**GOOD, **{name: value})


@pytest.mark.parametrize(
    ("name", "value", "instead"),
    [
        ("sp_size", 2, "set tp_size and enable_sequence_parallelism=True. Leave it out, or pass sp_size=None."),
        ("sp_size", True, "Sequences are sharded"),
        ("ep_size", 4, "set tp_size. Leave it out, or pass ep_size=1."),
        ("inner_ring_size", 2, "Leave it out, or pass inner_ring_size=None."),
        ("make_vocab_size_divisible_by", 128, "without padding. Leave it out, or pass"),
        ("custom_policy", object, "Use tensor_parallel_plan to set how layers are sharded"),
        ("scheduler_nodes", [], "Pass your own programs as schedule."),
        ("overlap_allgather", True, "Weights are there when optimizer.step() returns"),
        ("fp8_communication", True, "Leave it out, or pass fp8_communication=False."),
        ("use_fp8", True, "Use precision='bf16'."),
        ("dp_outside", False, "replicas are not. Leave it out, or pass dp_outside=True."),
        ("moe_dp_outside", False, "Tensor-parallel ranks are consecutive; replicas are not."),
    ],
)
def test_what_asks_for_more_is_refused_with_the_way_out(name, value, instead):
    with pytest.raises(ConfigError, match=rf"^{name} is not supported yet: got {name}=.*{re.escape(instead)}"):
        HybridParallelPlugin(**GOOD, **{name: value})


@pytest.mark.parametrize(
    ("other", "text"),
    [
        ({"cpu_offload": 1}, "cpu_offload must be True or False: got cpu_offload=1."),
        (
            {"cpu_offload": True, "offload_optimizer": 0.5},
            "cpu_offload and offload_optimizer are one setting: got cpu_",
        ),
        ({"zero_bucket_size_in_m": 0}, "zero_bucket_size_in_m must be a number above 0: got zero_bucket_size_in_m=0."),
    ],
)
def test_converted_settings_are_checked(other, text):
    with pytest.raises(ConfigError, match=f"^{re.escape(text)}"):
        HybridParallelPlugin(**GOOD, **other)


def test_attention_over_a_ring_is_named():
    with pytest.raises(ConfigError, match=r"^sequence_parallelism_mode='ring_attn' is not supported yet"):
        HybridParallelPlugin(**GOOD, enable_sequence_parallelism=True, sequence_parallelism_mode="ring_attn")


def test_the_number_of_ranks_that_share_sequences_may_be_given():
    def run():
        settings = {**GOOD, "tp_size": 2, "enable_sequence_parallelism": True}
        plugin = HybridParallelPlugin(**settings, sequence_parallelism_mode="split_gather", sp_size=2)
        assert (plugin.sp_size, plugin.sp_group) == (1, plugin.tp_group)
        with pytest.raises(ConfigError, match=r"^sp_size is not supported yet: got sp_size=4"):
            HybridParallelPlugin(**settings, sp_size=4)

    Loopback(2).run(run)


def test_the_sampler_of_a_dataloader_is_our_own():
    plugin = HybridParallelPlugin(**GOOD)
    assert len(plugin.prepare_dataloader([0, 1], batch_size=1, distributed_sampler_cls=None)) == 2
    text = "^prepare_dataloader selects each replica's samples itself: got .*make a DataLoader with a sampler for"
    with pytest.raises(ConfigError, match=text):
        plugin.prepare_dataloader([0, 1], batch_size=1, distributed_sampler_cls=DistributedSampler)


def test_the_first_and_the_last_rank_may_be_asked_for_instead_of_stages():
    def run():
        stages = HybridParallelPlugin(**{**GOOD, "pp_size": 2, "num_microbatches": 4}, schedule="zb-v").stage_manager
        ends = stages.is_first_stage(), stages.is_last_stage()
        return ends, (stages.is_first_stage(ignore_chunk=True), stages.is_last_stage(ignore_chunk=True))

    assert Loopback(2).run(run) == [((True, True), (True, False)), ((False, False), (False, True))]


def test_split_points_of_torch_are_understood():
    from torch.distributed.pipelining import SplitPoint

    points = {"0": SplitPoint.BEGINNING, "1": SplitPoint.END, "2": "before"}
    plain = {"0": "before", "1": "after", "2": "before"}
    assert PartitionConfig(split_points=points).split_points == plain
    model = nn.Sequential(*[nn.Linear(2, 2) for _ in range(3)])
    annotate_split_points(model, points)
    assert {name: vars(layer)["split_point"] for name, layer in model.named_children()} == plain
