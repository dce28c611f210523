"""A small language model with everything that makes dividing its weights hard, and runs of it."""

import torch
from support import replica_part
from torch import nn

from hybridpp import Booster, HybridParallelPlugin
from hybridpp.cluster import Loopback

VOCABULARY, WIDTH, LENGTH = 90, 48, 6


class Block(nn.Module):
    """A residual block with a norm and dropout."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, WIDTH + 2)
        self.drop = nn.Dropout(0.1)
        self.down = nn.Linear(WIDTH + 2, WIDTH)

    def forward(self, x):
        return x + self.down(self.drop(self.up(self.norm(x)).relu()))


class TiedModel(nn.Module):
    """Embedding and head share a weight; one block is frozen; a parameter is never used."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embed.weight
        self.unused = nn.Parameter(torch.ones(5))
        for parameter in self.blocks[1].parameters():
            parameter.requires_grad_(False)

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Torn(TiedModel):
    """With matrices that are larger than a replica's segment of their bucket."""

    def __init__(self):
        super().__init__()
        self.blocks[0].up, self.blocks[0].down = nn.Linear(WIDTH, 400), nn.Linear(400, WIDTH)


def without_dropout():
    """The same, for runs whose numbers of steps differ."""
    model = TiedModel()
    for block in model.blocks:
        block.drop.p = 0.0
    return model


def cross_entropy(logits, tokens):
    """Of other tokens than the inputs, which a tied head would predict at once."""
    return nn.functional.cross_entropy(logits.flatten(0, 1).float(), (tokens.flatten() + 1) % VOCABULARY)


def batches(num_steps, size):
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(0, VOCABULARY, (size, LENGTH), generator=generator) for _ in range(num_steps)]


def two_groups(parameters):
    """AdamW that decays matrices only."""
    parameters = list(parameters)
    matrices = [p for p in parameters if p.dim() > 1]
    others = [p for p in parameters if p.dim() <= 1]
    return torch.optim.AdamW(
        [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0}], lr=0.01
    )


def on_layout(run, *, dp_size, pp_size=1, tp_size=1, make_optimizer=two_groups, make_model=TiedModel, **settings):
    """What ``run(booster, model, optimizer)`` gives on each in-process rank."""

    def rank():
        plugin = HybridParallelPlugin(
            **{"pp_size": pp_size, "tp_size": tp_size, "num_microbatches": 4, "max_norm": 0.5, **settings}
        )
        booster, model = Booster(plugin=plugin), make_model()
        parts = booster.boost(model, make_optimizer(model.parameters()), criterion=cross_entropy, sample=SAMPLE)
        return run(booster, parts.model, parts.optimizer)

    return Loopback(dp_size * pp_size * tp_size).run(rank)


SAMPLE = batches(1, 2)[0]


def step(booster, model, optimizer, batch):
    """One call of the pipeline on this replica's part of a batch; returns the loss."""
    replica = booster.plugin.layout.here.dp
    data = iter([replica_part(batch, replica, booster.plugin.dp_size)])
    return booster.execute_pipeline(data, model, cross_entropy, optimizer)["loss"].item()


def weights_of(model):
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def assert_rounded(actual, expected):
    """Weights that AdamW of :func:`two_groups` has trained in fp32, with sums that were added in another order.

    AdamW divides a gradient by its own size. One that is a millionth of others has their rounding in its leading
    digits, so single elements may be further off than the rest, by a part of the learning rate. With SGD none is.
    """
    off = torch.cat([(actual[name] - weight).flatten() for name, weight in expected.items()])
    weights = torch.cat([weight.flatten() for weight in expected.values()])
    assert off.norm() <= 1e-6 * weights.norm(), f"off by {off.norm() / weights.norm():.1e} of the weights"
    share = (off.abs() > 1e-6).float().mean().item()
    assert share <= 3e-4, f"{share:.1e} of the elements are off by more than 1e-6"
    assert off.abs().max() <= 1e-4, f"an element is off by {off.abs().max():.1e}"
