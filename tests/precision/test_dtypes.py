from textwrap import dedent

import pytest
import torch
from support import boosted, sgd
from torch import nn

from hybridpp.cluster import Loopback


def test_a_description_says_what_computes_in_which_format():
    def run():
        model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.BatchNorm1d(4), nn.Linear(4, 2))
        booster, model, _ = boosted(model, sgd, (torch.ones(2, 4),), precision="bf16")
        return booster.plugin.describe_precision(model)

    assert Loopback(1).run(run)[0] == dedent("""\
        module                              | weights  | computes in
        ------------------------------------+----------+-----------------
        1 BatchNorm1d                       | float32  | float32
        1 LayerNorm                         | float32  | float32
        2 Linear                            | bfloat16 | bfloat16
        loss functions in the model         |          | float32 or wider
        criterion, gradient sums, optimizer |          | float32 or wider""")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("make", [nn.LayerNorm, lambda width: nn.GroupNorm(1, width), nn.RMSNorm])
def test_norms_of_torch_compute_in_fp32_inside(make, dtype):
    """The squares of these would overflow fp16."""
    torch.manual_seed(0)
    x = (300 * torch.randn(4, 16)).to(dtype)
    norm = make(16)
    exact = norm(x.float()).to(dtype)
    torch.testing.assert_close(norm.to(dtype)(x), exact, rtol=torch.finfo(dtype).eps, atol=torch.finfo(dtype).eps)
