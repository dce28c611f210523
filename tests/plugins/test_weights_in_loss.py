"""Losses of the script's own that read weights, where ranks have shards of them or none outside of forwards."""

from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from hybridpp import Booster, HybridParallelPlugin
from hybridpp.cluster import Loopback
from hybridpp.errors import ConfigError

X, Y = torch.linspace(-1, 1, 48).sin().view(2, 3, 8), torch.arange(6) % 4
TP = {"tp_size": 2, "enable_sequence_parallelism": True}


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x):
        return x + self.down(self.up(self.norm(x)).tanh())


class Network(nn.Module):
    def __init__(self, returns_penalty=False):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.blocks = nn.Linear(8, 8), nn.ModuleList(Block() for _ in range(2))
        self.head, self.returns_penalty = nn.Linear(8, 4), returns_penalty
        self.register_buffer("shift", torch.ones(4))

    def encode(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return x

    def forward(self, x):
        logits = self.head(self.encode(x))
        return (logits, squares(self.parameters())) if self.returns_penalty else logits


def squares(tensors):
    return 0.5 * sum(one.square().sum() for one in tensors)


def task(model):
    return F.cross_entropy(model(X).flatten(0, 1), Y)


def squares_after(model):
    return task(model) + squares(model.parameters())


def squares_before(model):
    penalty = squares(model.parameters())
    return task(model) + penalty


def norms(model):
    return task(model) + sum(parameter.norm() for parameter in model.blocks[0].up.parameters())


def of_norms(model):
    return task(model) + squares(model.blocks[1].norm.parameters())


def of_buffers(model):
    return task(model) + squares(model.buffers())


def of_parts(model):
    return F.cross_entropy(model.head(model.encode(X)).flatten(0, 1), Y)


def of_hidden(model):
    kept = []
    handle = model.blocks[1].up.register_forward_hook(lambda module, inputs, output: kept.append(output))
    loss = task(model) + kept[0].square().mean()
    handle.remove()
    return loss


def returned(model):
    logits, penalty = model(X)
    return F.cross_entropy(logits.flatten(0, 1), Y) + penalty


def trained(loss_of, inside=False, **settings):
    """All weights after two steps on two ranks that have the same batch."""

    def run():
        booster = Booster(plugin=HybridParallelPlugin(**settings))
        model = Network(returns_penalty=loss_of is returned)
        model, optimizer, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1), sample=X)
        for _ in range(2):
            with booster.unsharded(model) if inside else nullcontext():
                booster.backward(loss_of(model), optimizer)
            optimizer.step()
        with booster.unsharded(model):
            whole = [name for name, one in model.named_parameters() if one.shape == model_shapes[name]]
            return {name: model.get_parameter(name).detach().clone() for name in whole}

    model_shapes = {name: one.shape for name, one in Network().named_parameters()}
    return Loopback(2).run(run)[0]


@pytest.mark.parametrize(
    ("loss_of", "settings"),
    [
        (squares_after, {"zero_stage": 3}),
        (squares_before, {"zero_stage": 3}),
        (norms, {"zero_stage": 3}),
        (of_norms, TP),
    ],
)
def test_a_loss_that_reads_weights_of_which_ranks_have_parts_is_refused(loss_of, settings):
    with pytest.raises(ConfigError, match=r"depends on weights of the model \(\w+.*as with a penalty"):
        trained(loss_of, **settings)


@pytest.mark.parametrize(("loss_of", "settings"), [(squares_after, {"tp_size": 2}), (norms, TP)])
def test_a_loss_that_takes_elements_of_shards_together_is_refused(loss_of, settings):
    with pytest.raises(ConfigError, match=r"blocks.0.up.weight is a shard.* For a penalty in the loss"):
        trained(loss_of, **settings)


@pytest.mark.parametrize(
    ("loss_of", "settings"),
    [
        *[(loss_of, {"zero_stage": 3, "inside": True}) for loss_of in (squares_after, squares_before, norms)],
        *[(loss_of, {"zero_stage": 3}) for loss_of in (of_buffers, of_parts, of_hidden, returned)],
        *[(loss_of, {"tp_size": 2}) for loss_of in (of_norms, of_buffers, of_parts, returned)],
    ],
)
def test_other_losses_that_read_weights_are_those_of_one_process(loss_of, settings):
    model = Network(returns_penalty=loss_of is returned)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        loss_of(model).backward()
        optimizer.step()
    found = trained(loss_of, **settings)
    assert found
    for name, value in found.items():
        torch.testing.assert_close(value, model.get_parameter(name).detach(), rtol=1e-5, atol=1e-6, msg=name)


def test_a_criterion_that_reads_weights_with_summed_gradients_is_refused():
    def run():
        booster, model = Booster(plugin=HybridParallelPlugin(num_microbatches=1, **TP)), Network()
        model, optimizer, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1), sample=X)

        def criterion(outputs, inputs):
            return outputs.square().mean() + squares(model.blocks[1].norm.parameters())

        with pytest.raises(ConfigError, match=r"depends on weights of the model \(blocks.1.norm.*for each rank"):
            booster.execute_pipeline(iter([X]), model, criterion, optimizer)

    Loopback(2).run(run)
