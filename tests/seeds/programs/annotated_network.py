"""A network with a stage number on each layer: 2 stages, 2 micro-batches, 4 replicas, losses that are summed."""

import torch
from networks import Network
from torch import nn

import hybridpp
from hybridpp import Booster, HybridParallelPlugin

BATCH_SIZE, LEARNING_RATE, MOMENTUM = 4, 0.01, 0.9


def make_model():
    model = Network()
    for name in ("head", "layer1", "layer2"):
        model.get_submodule(name).pipeline_stage = 0
    for name in ("layer3", "layer4", "fc"):
        model.get_submodule(name).pipeline_stage = 1
    return model


def samples(count=32):
    generator = torch.Generator().manual_seed(1)
    return [(torch.randn(3, 8, 8, generator=generator), index % 3) for index in range(count)]


def main():
    hybridpp.launch_from_torch(seed=1)
    model = make_model()
    plugin = HybridParallelPlugin(pp_size=2, num_microbatches=2)
    dataset = plugin.prepare_dataloader(samples(), batch_size=BATCH_SIZE)
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE, momentum=MOMENTUM)
    booster = Booster(plugin=plugin, device="cpu")
    loss = nn.CrossEntropyLoss(reduction="sum")
    model, optimizer, loss, dataset, _ = booster.boost(model, optimizer, loss, dataset)
    losses, data_iter = [], iter(dataset)
    for _ in range(len(dataset)):
        losses.append(booster.execute_pipeline(data_iter, model, loss, optimizer)["loss"].item())
        optimizer.step()
    return losses, {name: weight.detach().clone() for name, weight in model.named_parameters()}


if __name__ == "__main__":
    main()
