"""TorchDDPPlugin against torch's DistributedDataParallel, on the same processes."""

import torch
from processes import run_ranks
from support import assert_near
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from hybridpp import Booster, TorchDDPPlugin

NUM_STEPS, NUM_REPLICAS = 5, 2


class Network(nn.Module):
    """With batch normalisation, and a parameter that no step uses."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 3))
        self.unused = nn.Parameter(torch.ones(2))

    def forward(self, x):
        return self.body(x)


def batch(step, replica):
    return torch.randn(6, 4, generator=torch.Generator().manual_seed(NUM_REPLICAS * step + replica))


def loss_of(outputs, inputs=None):
    return outputs.square().mean() + outputs.sum()


loss_of.reduction = "mean"  # the replicas' losses are averaged, as by DDP; else a sum would be that of the whole batch


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def state(model):
    return {name: value.clone() for name, value in model.state_dict().items()}


def _trained():
    """The state after some steps of DDP, and of the plugin."""
    rank = torch.distributed.get_rank()
    plain = Network()
    wrapped, optimizer = DistributedDataParallel(plain, find_unused_parameters=True), sgd(plain)
    for step in range(NUM_STEPS):
        optimizer.zero_grad()
        loss_of(wrapped(batch(step, rank))).backward()
        optimizer.step()
    booster, model = Booster(plugin=TorchDDPPlugin()), Network()
    model, optimizer, *_ = booster.boost(model, sgd(model))
    for step in range(NUM_STEPS):
        booster.execute_pipeline(iter([batch(step, rank)]), model, loss_of, optimizer)
        optimizer.step()
    return state(plain), state(model)


def test_weights_are_those_of_ddp_and_statistics_those_of_one_process():
    one_process, momentum = Network().body[1], 0.1
    ranks = run_ranks(_trained, NUM_REPLICAS)
    theirs, ours = ranks[0]
    parameters = dict(Network().named_parameters())
    assert_near({name: ours[name] for name in parameters}, {name: theirs[name] for name in parameters}, 1e-6)
    # In the first layers the replicas' batches are known: those of both count, and DDP keeps the first replica's.
    mean, mean_of_first = one_process.running_mean.clone(), one_process.running_mean.clone()
    weights = Network()
    optimizer = sgd(weights)
    for step in range(NUM_STEPS):
        hidden = [weights.body[0](batch(step, replica)).detach().mean(0) for replica in range(NUM_REPLICAS)]
        for value in hidden:
            mean = (1 - momentum) * mean + momentum * value
        mean_of_first = (1 - momentum) * mean_of_first + momentum * hidden[0]
        optimizer.zero_grad()
        sum(loss_of(weights(batch(step, replica))) / NUM_REPLICAS for replica in range(NUM_REPLICAS)).backward()
        optimizer.step()
    assert_near({"mean": ours["body.1.running_mean"]}, {"mean": mean}, 1e-6)
    assert_near({"mean": theirs["body.1.running_mean"]}, {"mean": mean_of_first}, 1e-6)
    assert (ours["body.1.running_mean"] - theirs["body.1.running_mean"]).abs().max() > 1e-3
    assert all(ranks[1][1][name].equal(value) for name, value in ours.items())
