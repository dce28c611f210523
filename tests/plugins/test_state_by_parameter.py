"""The optimizer's state by the parameters of the model, in fp32 and where copies or parts of them are updated."""

import pytest
import torch
from support import boosted
from torch import nn

from hybridpp.cluster import Loopback
from hybridpp.errors import ConfigError


def trained(**settings):
    torch.manual_seed(0)
    x = torch.ones(2, 4)
    model, adam = nn.Linear(4, 3), lambda parameters: torch.optim.Adam(parameters, lr=0.1)
    booster, model, optimizer = boosted(model, adam, x, **settings)
    booster.execute_pipeline(iter([x]), model, lambda y, _: y.float().square().mean(), optimizer)
    optimizer.step()
    return model, optimizer


@pytest.mark.parametrize("settings", [{}, {"precision": "bf16"}, {"offload_optimizer": 1.0}], ids=str)
def test_a_parameter_stands_for_what_is_updated_for_it(settings):
    def run():
        model, optimizer = trained(**settings)
        state = optimizer.unwrap().state
        held = {id(one): one for group in optimizer.param_groups for one in group["params"]}
        for parameter in model.parameters():
            assert any(optimizer.state[parameter] is state[one] for one in held.values())
            assert parameter in optimizer.state
            assert optimizer.state.get(parameter)["exp_avg"].shape == parameter.shape
        assert optimizer.state.get(torch.ones(1)) is None
        assert len(optimizer.state) == len([*optimizer.state.values()]) == len(state) == 2
        optimizer.state[model.weight] = {}
        del optimizer.state[model.bias]
        assert [*state.values()] == [{}]

    Loopback(1).run(run)


@pytest.mark.parametrize("settings", [{"zero_stage": 1}, {"zero_stage": 3, "precision": "bf16"}], ids=str)
def test_a_parameter_of_which_replicas_update_parts_is_refused_by_name(settings):
    def run():
        model, optimizer = trained(**settings)
        for look in (lambda: optimizer.state[model.weight], lambda: model.weight in optimizer.state):
            with pytest.raises(ConfigError, match=r"^this rank has no state of all of 'weight': with ZeRO, "):
                look()
        parts = [one for group in optimizer.param_groups for one in group["params"]]
        assert all(optimizer.state[one]["exp_avg"].shape == one.shape for one in parts)

    Loopback(2).run(run)
