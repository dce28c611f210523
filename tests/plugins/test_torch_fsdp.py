import re

import pytest
import torch
from torch.distributed.fsdp import CPUOffload, MixedPrecision, ShardingStrategy

from hybridpp import TorchFSDPPlugin
from hybridpp.errors import ConfigError


@pytest.mark.parametrize("strategy", [None, *ShardingStrategy])
def test_every_strategy_of_torch_is_known(strategy):
    expected = {"SHARD_GRAD_OP": 2, "_HYBRID_SHARD_ZERO2": 2, "NO_SHARD": 0}
    plugin = TorchFSDPPlugin(sharding_strategy=strategy)
    assert plugin.zero_stage == expected.get(getattr(strategy, "name", None), 3)


@pytest.mark.parametrize(
    ("mixed", "precision", "communication"),
    [
        (MixedPrecision(), "fp32", None),
        (MixedPrecision(param_dtype=torch.float32, reduce_dtype=torch.float32), "fp32", torch.float32),
        (MixedPrecision(param_dtype=torch.float16, buffer_dtype=torch.float16), "fp16", None),
        (MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16), "bf16", torch.bfloat16),
    ],
)
def test_a_policy_of_torch_gives_the_precision(mixed, precision, communication):
    plugin = TorchFSDPPlugin(mixed_precision=mixed)
    expected = TorchFSDPPlugin(precision=precision, communication_dtype=communication).settings
    assert (plugin.precision, plugin.settings) == (precision, expected)
    assert plugin.control_precision()


@pytest.mark.parametrize(
    ("keywords", "text"),
    [
        (
            {"sharding_strategy": "ZERO"},
            "sharding_strategy must be a member of torch's ShardingStrategy, one of FULL_SHARD, SHARD_GRAD_OP, "
            "NO_SHARD, HYBRID_SHARD, _HYBRID_SHARD_ZERO2: got 'ZERO'.",
        ),
        (
            {"mixed_precision": "bf16"},
            "mixed_precision must be torch's MixedPrecision, with param_dtype float32, float16 or bfloat16: got "
            "'bf16'. Pass precision='bf16' instead.",
        ),
        (
            {"mixed_precision": MixedPrecision(param_dtype=torch.float16), "precision": "bf16"},
            "mixed_precision and precision are one setting: got param_dtype=torch.float16 and precision='bf16'. Give "
            "one of them.",
        ),
        (
            {"mixed_precision": MixedPrecision(param_dtype=torch.float16, keep_low_precision_grads=True)},
            "gradients are summed in fp32: got keep_low_precision_grads=True. Leave it out of MixedPrecision.",
        ),
        (
            {"cpu_offload": CPUOffload(offload_params=True)},
            "cpu_offload is not supported: got offload_params=True, and weights stay on the device. Pass "
            "offload_optimizer=1.0 to keep fp32 masters and the optimizer's state in host memory.",
        ),
        ({"cpu_offload": True}, "cpu_offload must be torch's CPUOffload: got True. Leave it out."),
    ],
)
def test_what_it_does_not_do_is_refused_with_advice(keywords, text):
    with pytest.raises(ConfigError, match=f"^{re.escape(text)}$"):
        TorchFSDPPlugin(**keywords)
