"""The norm of a gradient of 1e7 elements, sharded over tensor-parallel ranks and divided by ZeRO; the clipped step."""

import pytest
import torch
from torch import nn

from hybridpp import Booster, HybridParallelPlugin
from hybridpp.cluster import Loopback

ROWS, WIDTH = 10_000, 1_000


def weight():
    return torch.linspace(-1.0, 1.0, ROWS * WIDTH).view(ROWS, WIDTH)


def inputs():
    return torch.linspace(0.1, 1.0, 4 * WIDTH).view(4, WIDTH)


@pytest.mark.parametrize(("dp_size", "zero_stage"), [(1, 0), (2, 1)])
def test_the_norm_is_right_to_a_millionth_and_the_step_is_clipped_by_it(dp_size, zero_stage):
    def run():
        plugin = HybridParallelPlugin(
            tp_size=2, max_norm=0.5, zero_stage=zero_stage, tensor_parallel_plan={"0": "gathered_column"}
        )
        model = nn.Sequential(nn.utils.skip_init(nn.Linear, WIDTH, ROWS, bias=False))
        with torch.no_grad():
            model[0].weight.copy_(weight())
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        booster, batch = Booster(plugin=plugin), inputs().chunk(dp_size)[plugin.layout.here.dp]
        parts = booster.boost(model, optimizer, lambda outputs, _: outputs.square().mean() * 1e4, sample=batch)
        booster.execute_pipeline(iter([batch]), parts.model, parts.criterion, parts.optimizer)
        parts.optimizer.step()
        shard = next(parts.model.parameters())
        moved = (shard.detach().clone().double() - weight().chunk(2)[plugin.layout.here.tp].double()).square().sum()
        return parts.optimizer.get_grad_norm(), shard.numel(), moved.item()

    # The mean is over four samples in every layout.
    outputs = inputs().double() @ weight().double().t()
    expected = (outputs.t() @ inputs().double() * (2e4 / outputs.numel())).norm().item()
    ranks = Loopback(2 * dp_size).run(run)
    for norm, num_elements, _ in ranks:
        assert num_elements == ROWS * WIDTH / 2
        assert norm == pytest.approx(expected, rel=1e-6)
        assert norm > 1
    # The update, over both shards, is as long as the gradient may be; weights near 1 round it.
    assert sum(moved for *_, moved in ranks[:2]) ** 0.5 == pytest.approx(0.5, rel=1e-4)
