"""A transformer, cut before its fifth layer: 2 ranks, GPipe, the loss of each micro-batch, two epochs.

Lines, names and their order are those of the tutorial; imports, what they import and sizes are changed.
"""

import torch
from torch import nn, optim
from torch.distributed.pipelining import ScheduleGPipe, SplitPoint

import hybridpp
from hybridpp import Booster, HybridParallelPlugin

vocab_size, dim, num_layers, num_microbatches = 20, 8, 8, 4
lr, momentum = 0.1, 0.9


class Transformer(nn.Module):
    """Layers in a dict, by number."""

    def __init__(self, vocab_size):
        super().__init__()
        self.tok_embeddings = nn.Embedding(vocab_size, dim)
        self.layers = nn.ModuleDict(
            {str(number): nn.TransformerDecoderLayer(dim, 2, 16, 0.0, batch_first=True) for number in range(num_layers)}
        )
        self.norm = nn.LayerNorm(dim)
        self.output = nn.Linear(dim, vocab_size)

    def forward(self, tokens):
        h = self.tok_embeddings(tokens) if self.tok_embeddings else tokens
        for layer in self.layers.values():
            h = layer(h, h)
        h = self.norm(h) if self.norm else h
        return self.output(h).clone() if self.output else h


def make_model():
    torch.manual_seed(0)
    return Transformer(vocab_size=vocab_size)


def data():
    generator = torch.Generator().manual_seed(1)
    return tuple(torch.randint(0, vocab_size, (8, 6), generator=generator) for _ in range(2))


def tokenwise_loss_fn(outputs, targets):
    loss_fn = nn.CrossEntropyLoss()
    outputs = outputs.reshape(-1, vocab_size)
    targets = targets.reshape(-1)
    return loss_fn(outputs, targets)


def main():
    hybridpp.launch_from_torch()
    model = make_model()
    x, y = data()

    # example data (microbatch-sized) to prime the pipeline, to create the job graph
    example_input_microbatch = x.chunk(num_microbatches)[0]

    split_spec = {"layers.4": SplitPoint.BEGINNING}
    plugin = HybridParallelPlugin(
        pp_size=2, split_points=split_spec, schedule=ScheduleGPipe, num_microbatches=num_microbatches
    )
    optimizer = optim.SGD(model.parameters(), lr=lr, momentum=momentum)
    booster = Booster(plugin=plugin, device="cpu")
    model, optimizer, *_ = booster.boost(model, optimizer, sample=(example_input_microbatch,))

    means = []
    for _ in range(2):
        optimizer.zero_grad()
        losses = booster.execute_pipeline(iter([(x, y)]), model, tokenwise_loss_fn, optimizer, return_losses=True)[
            "losses"
        ]
        means.append(torch.mean(losses).item())
        optimizer.step()
    return means, {name for name, _ in model.named_parameters()}


if __name__ == "__main__":
    main()
