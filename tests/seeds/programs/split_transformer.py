"""A transformer, cut before its fifth layer by torch's SplitPoint: 2 ranks, GPipe, the loss of each micro-batch."""

import torch
from torch import nn
from torch.distributed.pipelining import SplitPoint

import hybridpp
from hybridpp import Booster, HybridParallelPlugin

DIM, HEADS, LAYERS, VOCABULARY = 8, 2, 8, 20
BATCH_SIZE, SEQUENCE, NUM_MICROBATCHES = 8, 6, 4


class Transformer(nn.Module):
    """Layers in a dict, by number."""

    def __init__(self):
        super().__init__()
        self.tok_embeddings = nn.Embedding(VOCABULARY, DIM)
        self.layers = nn.ModuleDict(
            {str(number): nn.TransformerDecoderLayer(DIM, HEADS, 16, 0.0, batch_first=True) for number in range(LAYERS)}
        )
        self.norm = nn.LayerNorm(DIM)
        self.output = nn.Linear(DIM, VOCABULARY)

    def forward(self, tokens):
        hidden = self.tok_embeddings(tokens)
        for layer in self.layers.values():
            hidden = layer(hidden, hidden)
        return self.output(self.norm(hidden))


def make_model():
    torch.manual_seed(0)
    return Transformer()


def batch():
    generator = torch.Generator().manual_seed(1)
    return tuple(torch.randint(0, VOCABULARY, (BATCH_SIZE, SEQUENCE), generator=generator) for _ in range(2))


def tokenwise_loss_fn(outputs, inputs):
    return nn.functional.cross_entropy(outputs.flatten(0, 1), inputs[1].flatten())


def main():
    hybridpp.launch_from_torch()
    model = make_model()
    plugin = HybridParallelPlugin(
        pp_size=2,
        num_microbatches=NUM_MICROBATCHES,
        schedule="ScheduleGPipe",
        split_points={"layers.4": SplitPoint.BEGINNING},
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    booster = Booster(plugin=plugin, device="cpu")
    example = tuple(tensor.chunk(NUM_MICROBATCHES)[0] for tensor in batch())
    model, optimizer, *_ = booster.boost(model, optimizer, sample=example)
    losses = []
    for _ in range(2):
        optimizer.zero_grad()
        result = booster.execute_pipeline(iter([batch()]), model, tokenwise_loss_fn, optimizer, return_losses=True)
        optimizer.step()
        losses.append(result["losses"].mean().item())
    return losses, {name for name, _ in model.named_parameters()}


if __name__ == "__main__":
    main()
