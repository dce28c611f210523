"""Layers that are attributes, cut into 3 stages: 64 micro-batches forward only, then a model that returns its loss.

Lines, names, sizes and their order are those of the document; imports, and what they import, are changed.
"""

import torch
from torch.distributed.pipelining import SplitPoint

import hybridpp
from hybridpp import Booster, HybridParallelPlugin
from hybridpp.partition import annotate_split_points


class MyNetworkBlock(torch.nn.Module):
    """A linear layer and its activation."""

    def __init__(self, in_dim, out_dim):
        super().__init__()
        self.lin = torch.nn.Linear(in_dim, out_dim)

    def forward(self, x):
        x = self.lin(x)
        x = torch.relu(x)
        return x


class MyNetwork(torch.nn.Module):
    """As many blocks as there are widths, found by name."""

    def __init__(self, in_dim, layer_dims):
        super().__init__()

        prev_dim = in_dim
        for i, dim in enumerate(layer_dims):
            setattr(self, f"layer{i}", MyNetworkBlock(prev_dim, dim))
            prev_dim = dim

        self.num_layers = len(layer_dims)

    def forward(self, x):
        for i in range(self.num_layers):
            x = getattr(self, f"layer{i}")(x)

        return x


class LossWrapper(torch.nn.Module):
    """The document imports it."""

    def __init__(self, module, loss_fn):
        super().__init__()
        self.module, self.loss_fn = module, loss_fn


class ModelLossWrapper(LossWrapper):
    """The model with its loss in the forward."""

    def forward(self, x, target):
        return self.loss_fn(self.module(x), target)


def the_loss(outputs, inputs):
    return outputs


def main():
    hybridpp.launch_from_torch()
    torch.manual_seed(0)
    mn = MyNetwork(512, [512, 1024, 256])
    reference = MyNetwork(512, [512, 1024, 256])
    reference.load_state_dict(mn.state_dict())
    x, target = torch.randn(512, 512), torch.randn(512, 256)

    annotate_split_points(mn, {"layer0": SplitPoint.END, "layer1": SplitPoint.END})

    booster = Booster(
        plugin=HybridParallelPlugin(pp_size=3, num_microbatches=64, schedule="PipelineDriverFillDrain"), device="cpu"
    )
    pipe = booster.boost(mn, sample=x[:1]).model
    printed = booster.plugin.describe_stages(pipe)

    # Run the pipeline with input `x`. Divide the batch into 64 micro-batches
    # and run them in parallel on the pipeline
    with torch.no_grad():
        output = booster.execute_pipeline(iter([x]), pipe, return_loss=False, return_outputs=True, outputs_on="first")[
            "outputs"
        ]

    # Run the original code and get the output for comparison
    reference_output = reference(x)

    # Compare numerics of pipeline and original model
    if output is not None:
        torch.testing.assert_close(output, reference_output)

    loss_wrapper = ModelLossWrapper(module=reference, loss_fn=torch.nn.MSELoss(reduction="sum"))
    reference_output = loss_wrapper(x, target).detach()

    annotate_split_points(loss_wrapper.module, {"layer0": SplitPoint.END, "layer1": SplitPoint.END})
    optimizer = torch.optim.SGD(loss_wrapper.parameters(), lr=1e-6)
    pipe, optimizer, *_ = booster.boost(loss_wrapper, optimizer, sample=(x[:1], target[:1]), loss_reduction="sum")

    # note the additional `target` argument, as the module we're running is
    # ModelLossWrapper
    output = booster.execute_pipeline(iter([(x, target)]), pipe, the_loss, optimizer)["loss"]

    # Compare numerics of pipeline and original model
    torch.testing.assert_close(output, reference_output)
    optimizer.step()
    return printed, {name: weight.detach().clone() for name, weight in pipe.named_parameters()}


if __name__ == "__main__":
    main()
