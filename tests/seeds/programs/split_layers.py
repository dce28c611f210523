"""Layers that are attributes, cut into 3 stages: outputs on the first rank, then a model that returns its loss."""

import torch
from torch import nn
from torch.distributed.pipelining import SplitPoint

import hybridpp
from hybridpp import Booster, HybridParallelPlugin
from hybridpp.partition import annotate_split_points

ROWS, CHUNKS = 64, 64


class Block(nn.Module):
    """A linear layer and its activation."""

    def __init__(self, in_dim, out_dim):
        super().__init__()
        self.lin = nn.Linear(in_dim, out_dim)

    def forward(self, x):
        return torch.relu(self.lin(x))


class Layers(nn.Module):
    """As many blocks as there are widths, found by name."""

    def __init__(self, in_dim, layer_dims):
        super().__init__()
        torch.manual_seed(0)
        self.num_layers = len(layer_dims)
        for number, (inputs, outputs) in enumerate(zip([in_dim, *layer_dims], layer_dims, strict=False)):
            setattr(self, f"layer{number}", Block(inputs, outputs))

    def forward(self, x):
        for number in range(self.num_layers):
            x = getattr(self, f"layer{number}")(x)
        return x


class WithLoss(nn.Module):
    """The model and its loss in one module."""

    def __init__(self, module, loss_fn):
        super().__init__()
        self.module, self.loss_fn = module, loss_fn

    def forward(self, x, target):
        return self.loss_fn(self.module(x), target)


def make_model():
    return Layers(8, [8, 16, 4])


def with_loss():
    return WithLoss(make_model(), nn.MSELoss(reduction="sum"))


def data():
    generator = torch.Generator().manual_seed(1)
    return torch.randn(ROWS, 8, generator=generator), torch.randn(ROWS, 4, generator=generator)


def the_loss(outputs, inputs):
    return outputs


the_loss.reduction = "sum"


def main():
    hybridpp.launch_from_torch()
    booster = Booster(plugin=HybridParallelPlugin(pp_size=3, num_microbatches=CHUNKS, schedule="gpipe"), device="cpu")
    x, target = data()

    network = make_model()
    annotate_split_points(network, {"layer0": SplitPoint.END, "layer1": SplitPoint.END})
    network = booster.boost(network, sample=x[:1]).model
    with torch.no_grad():
        forward = booster.execute_pipeline(
            iter([x]), network, return_loss=False, return_outputs=True, outputs_on="first"
        )

    whole = with_loss()
    annotate_split_points(whole, {"module.layer0": SplitPoint.END, "module.layer1": SplitPoint.END})
    optimizer = torch.optim.SGD(whole.parameters(), lr=1e-3)
    whole, optimizer, *_ = booster.boost(whole, optimizer, sample=(x[:1], target[:1]))
    losses = []
    for _ in range(2):
        losses.append(booster.execute_pipeline(iter([(x, target)]), whole, the_loss, optimizer)["loss"].item())
        optimizer.step()
    return forward["outputs"], losses, {name for name, _ in whole.named_parameters()}


if __name__ == "__main__":
    main()
