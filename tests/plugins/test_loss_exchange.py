import pytest
import torch
from support import boosted
from torch import Tensor, nn

from hybridpp.cluster import Loopback, current_world
from hybridpp.errors import DeadlockError


def test_a_loss_whose_exchange_failed_raises_the_same_error_at_every_read():
    def run():
        torch.manual_seed(0)
        booster, model, _ = boosted(nn.Linear(6, 6), None, torch.zeros(2, 6))
        data = iter(booster.plugin.prepare_dataloader(torch.zeros(8, 6), batch_size=1))
        raised = []
        with torch.no_grad():
            # The criterion is checked in the first one, by all ranks; rank 1 makes no second one.
            for _ in range(2 - current_world().rank):
                loss = booster.execute_pipeline(data, model, lambda outputs, inputs: outputs.square().mean())["loss"]
        if current_world().rank == 0:
            for read in (Tensor.item, Tensor.item, Tensor.double):
                with pytest.raises(DeadlockError) as caught:
                    read(loss)
                raised.append(caught.value)
        return len(set(raised))

    assert Loopback(2).run(run) == [1, 0]
