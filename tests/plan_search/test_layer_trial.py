"""Linear layers with forwards of their own, in plans that the user gave."""

import pytest
import torch
from support import boosted, sgd
from torch import Tensor, nn
from torch.nn import functional

from hybridpp.cluster import Loopback
from hybridpp.errors import ConfigError

WIDTH, INNER = 8, 24


class Grouped(nn.Linear):
    """Computes as a group of one; rows of its weight must be multiples of 16 bytes."""

    def forward(self, x: Tensor) -> Tensor:
        flat = x.flatten(0, -2)
        ends = torch.tensor([len(flat)], dtype=torch.int32, device=x.device)
        return functional.grouped_mm(flat, self.weight.t()[None], offs=ends).unflatten(0, x.shape[:-1])


class Net(nn.Module):
    """Two layers, of which the second has a forward of its own."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = nn.Linear(WIDTH, INNER, bias=False), Grouped(INNER, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x).relu())


PLAN = {"up": "column", "down": "row"}


def boost_by_hand(precision: str) -> list[torch.Size]:
    def run():
        x = torch.ones(2, 3, WIDTH)
        return boosted(Net(), sgd, x, tp_size=2, precision=precision, tensor_parallel_plan=PLAN)[1].down.weight.shape

    return Loopback(2).run(run)


def test_a_layer_of_the_users_plan_whose_shard_a_kernel_refuses_is_named():
    with pytest.raises(ConfigError) as raised:
        boost_by_hand("fp16")
    assert str(raised.value) == (
        "tensor_parallel_plan divides layers that cannot compute with a shard: 'down' is 'row' over tp_size=2, and its "
        "shard raises RuntimeError: strides should be multiple of 16 bytes (in float16). Leave it out of "
        "tensor_parallel_plan, or use another tp_size or precision."
    )


def test_it_is_divided_in_formats_in_which_it_runs():
    assert boost_by_hand("fp32") == [(WIDTH, INNER // 2)] * 2
