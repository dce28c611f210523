"""A loss that goes through several boosted models: generator and discriminator, encoder and decoder."""

import pytest
import torch
from torch import nn

from hybridpp import Booster, HybridParallelPlugin
from hybridpp.cluster import Loopback, current_world
from hybridpp.errors import ConfigError


def networks():
    torch.manual_seed(0)
    models = [nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, size)) for size in (4, 1)]
    return models, [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]


def adversarial(generator, judge, optimizers, backward, x):
    of_generator, of_judge = optimizers
    of_judge.zero_grad()
    backward(judge(generator(x).detach()).mean() - judge(x).mean(), of_judge)
    of_judge.step()
    of_generator.zero_grad()
    backward(-judge(generator(x)).mean(), of_generator)
    of_generator.step()


def together(encoder, decoder, optimizers, backward, x):
    for optimizer in optimizers:
        optimizer.zero_grad()
    backward(decoder(encoder(x)).square().mean(), optimizers[0])
    for optimizer in optimizers:
        optimizer.step()


@pytest.mark.parametrize("script", [adversarial, together])
@pytest.mark.parametrize(
    ("settings", "limit"),
    [
        ({}, 1e-7),
        ({"max_norm": 1e9}, 1e-7),
        ({"zero_stage": 1}, 1e-7),
        ({"zero_stage": 3}, 1e-7),
        ({"precision": "fp16"}, 1e-3),
    ],
)
def test_a_loss_through_two_models_trains_them_as_in_one_process(script, settings, limit):
    batches = torch.randn(3, 2, 4, 4, generator=torch.Generator().manual_seed(1))

    def run():
        booster = Booster(plugin=HybridParallelPlugin(**settings), device="cpu")
        parts = [booster.boost(model, optimizer) for model, optimizer in zip(*networks(), strict=True)]
        models, optimizers = [part.model for part in parts], [part.optimizer for part in parts]
        for batch in batches:
            script(*models, optimizers, booster.backward, batch[current_world().rank])
        with booster.unsharded(models[0]), booster.unsharded(models[1]):
            return [p.detach().float() for model in models for p in model.parameters()]

    found = Loopback(2).run(run)
    models, optimizers = networks()
    for batch in batches:
        script(*models, optimizers, lambda loss, _: loss.backward(), batch.flatten(0, 1))
    expected = [p for model in models for p in model.parameters()]
    assert max((a - b).abs().max() for rank in found for a, b in zip(rank, expected, strict=True)) < limit


def test_a_pass_of_another_booster_is_told_to_use_one_for_all_models():
    models, optimizers = networks()
    boosters = [Booster(plugin=HybridParallelPlugin(), device="cpu") for _ in models]
    parts = [b.boost(m, o) for b, m, o in zip(boosters, models, optimizers, strict=True)]
    with pytest.raises(ConfigError, match="with one booster for all of them and pp_size=1"):
        boosters[0].backward(parts[1].model(parts[0].model(torch.ones(2, 4))).mean(), parts[0].optimizer)
