import re

import pytest

from hybridpp import GeminiPlugin
from hybridpp.errors import ConfigError

STATIC = "Use placement_policy='static', with offload_optim_frac for what lies in host memory."


@pytest.mark.parametrize(
    ("keywords", "text"),
    [
        (
            {"placement_policy": "auto"},
            "placement_policy='auto' is not supported: GeminiPlugin does not move weights and optimizer state by "
            f"measured memory. {STATIC}",
        ),
        (
            {"placement_policy": "cpu"},
            f"placement_policy='cpu' is not supported: GeminiPlugin does not keep weights in host memory. {STATIC}",
        ),
        (
            {"placement_policy": "dynamic"},
            f"placement_policy must be 'static' or 'cuda': got placement_policy='dynamic'. {STATIC}",
        ),
        (
            {"placement_policy": "cuda", "offload_optim_frac": 0.5},
            "placement_policy='cuda' keeps everything on the device: got offload_optim_frac=0.5. Use "
            "placement_policy='static'.",
        ),
        *(
            (
                {"shard_param_frac": share},
                f"shard_param_frac must be 1 or 0: got shard_param_frac={share!r}. All weights are divided (1), and "
                "gathered by unit where they are used, or none (0).",
            )
            for share in (0.5, True, "1")
        ),
        (
            {"offload_optim_frac": 1.5},
            "offload_optimizer must be from 0 to 1: got offload_optimizer=1.5. Use 1.0 to keep all of the optimizer's "
            "state in host memory.",
        ),
    ],
)
def test_what_it_does_not_do_is_refused_with_advice(keywords, text):
    with pytest.raises(ConfigError, match=f"^{re.escape(text)}$"):
        GeminiPlugin(**keywords)
