"""A script that sets ``parameter.grad`` to None freezes the parameter for a step, as in torch, in every layout."""

import pytest
import torch
from support import assert_near, boosted
from torch import nn

from hybridpp.cluster import Loopback, current_world
from hybridpp.errors import UnlikeCallsError

NAMES = ("0.bias", "2.weight")


def make_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))


def adamw(parameters):
    return torch.optim.AdamW(parameters, lr=0.1, weight_decay=0.5)


def batch(step):
    generator = torch.Generator().manual_seed(step)
    return torch.randn(4, 4, generator=generator), torch.randn(4, 4, generator=generator)


def clear(model, step):
    for name, parameter in model.named_parameters():
        if name in NAMES and step:
            parameter.grad = None


def alone():
    model = make_model()
    optimizer = adamw(model.parameters())
    for step in range(3):
        optimizer.zero_grad()
        inputs, target = batch(step)
        nn.functional.mse_loss(model(inputs), target).backward()
        clear(model, step)
        optimizer.step()
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("settings", [{}, {"max_norm": 1e3}, {"pp_size": 2}], ids=str)
def test_what_has_no_gradient_is_not_updated_with_replicas_either(settings):
    def run():
        booster, model, optimizer = boosted(make_model(), adamw, (torch.zeros(1, 4),), **settings)
        replica = booster.plugin.layout.here.dp
        for step in range(3):
            data = iter([tuple(part[2 * replica : 2 * replica + 2] for part in batch(step))])
            booster.execute_pipeline(data, model, nn.MSELoss(), optimizer)
            clear(model, step)
            optimizer.step()
        return {name: parameter.detach() for name, parameter in model.named_parameters()}

    weights = {}
    for rank in Loopback(2 * settings.get("pp_size", 1)).run(run):
        weights |= rank
    assert_near(weights, alone(), 1e-6)


def test_a_gradient_that_one_replica_lacks_ends_the_run_on_all():
    def run():
        booster, model, optimizer = boosted(make_model(), adamw, (torch.zeros(1, 4),))
        for step in range(2):
            booster.execute_pipeline(iter([batch(step)]), model, nn.MSELoss(), optimizer)
            if current_world().rank == 1:
                model[0].bias.grad = None
            optimizer.step()

    with pytest.raises(UnlikeCallsError, match=r"set parameter\.grad to None on rank 1, of ranks 0"):
        Loopback(2).run(run)


def test_a_gradient_that_is_dropped_between_two_passes_counts_from_there():
    def run():
        booster, model, optimizer = boosted(make_model(), adamw, (torch.zeros(1, 4),))
        before = model[2].bias.detach().clone()
        booster.execute_pipeline(iter([batch(0)]), model, nn.MSELoss(), optimizer)
        model[2].bias.grad = None
        model[2].bias.requires_grad_(False)
        booster.execute_pipeline(iter([batch(1)]), model, nn.MSELoss(), optimizer)
        optimizer.step()
        assert torch.equal(model[2].bias, before)

    for size in (1, 2):
        Loopback(size).run(run)
