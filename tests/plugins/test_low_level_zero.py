import re

import pytest

from hybridpp import LowLevelZeroPlugin
from hybridpp.errors import ConfigError


@pytest.mark.parametrize("stage", [0, 3, True, "1"])
def test_another_stage_is_refused_with_advice(stage):
    text = f"stage must be 1 or 2: got stage={stage!r}. Use GeminiPlugin, or HybridParallelPlugin(zero_stage=3), to"
    with pytest.raises(ConfigError, match=f"^{re.escape(text)}"):
        LowLevelZeroPlugin(stage=stage)


@pytest.mark.parametrize("size", ["12", 0, True])
def test_a_bucket_size_that_is_no_size_is_refused(size):
    text = (
        f"reduce_bucket_size_in_m must be a number above 0: got reduce_bucket_size_in_m={size!r}. Leave it out for 12."
    )
    with pytest.raises(ConfigError, match=f"^{re.escape(text)}$"):
        LowLevelZeroPlugin(reduce_bucket_size_in_m=size)
