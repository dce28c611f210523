"""What many tests need: a small model, small batches, a training run, and comparisons."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from copies import copied
from torch import Tensor, nn
from transformers import ViTConfig, ViTForImageClassification

from hybridpp import Booster, HybridParallelPlugin
from hybridpp.cluster import Group, Loopback, current_world
from hybridpp.data_parallel.accumulator import GradientHooks
from hybridpp.pipeline import split_batch, to_plain_containers
from hybridpp.tensor_parallel import sharding_of

ROOT = Path(__file__).parents[1]
IMAGE, NUM_LABELS = 8, 5


@copied
def tiny_vit(dropout: float = 0.0, num_layers: int = 4, seed: int = 0) -> ViTForImageClassification:
    """A ViT with 5 tokens of width 16, in training mode, the same at every call."""
    torch.manual_seed(seed)
    config = ViTConfig(
        hidden_size=16,
        num_hidden_layers=num_layers,
        num_attention_heads=2,
        intermediate_size=32,
        image_size=IMAGE,
        patch_size=4,
        num_labels=NUM_LABELS,
        hidden_dropout_prob=dropout,
        attention_probs_dropout_prob=dropout,
    )
    return ViTForImageClassification(config).train()


def small_vit(dropout: float = 0.0, seed: int = 0) -> ViTForImageClassification:
    """A ViT of two layers, for tests that have no use for more: a third less time at each step and boost."""
    return tiny_vit(dropout, num_layers=2, seed=seed)


def in_half(model: nn.Module, dtype: torch.dtype) -> Any:
    """The model with its parameters in half precision, but for its norms, in plain torch."""
    for module in model.modules():
        if not type(module).__name__.endswith("Norm"):
            for parameter in module.parameters(recurse=False):
                parameter.data = parameter.data.to(dtype)
            continue
        module.register_forward_pre_hook(lambda _, args: (args[0].float(),))
        module.register_forward_hook(lambda _, args, output: output.to(dtype))
    return model


def image_batch(num_samples: int, seed: int = 0) -> dict[str, Tensor]:
    """Random images with labels."""
    generator = torch.Generator().manual_seed(seed)
    return {
        "pixel_values": torch.randn(num_samples, 3, IMAGE, IMAGE, generator=generator),
        "labels": torch.randint(0, NUM_LABELS, (num_samples,), generator=generator),
    }


def model_loss(outputs: Any, inputs: Any) -> Tensor:
    """The criterion of a Hugging Face model that was given labels."""
    return outputs.loss


def boosted(
    model: nn.Module,
    make_optimizer: Callable[[Any], torch.optim.Optimizer] | None,
    sample: Any,
    device: str = "cpu",
    **settings: Any,
) -> tuple[Booster, Any, Any]:
    """A booster with the model and optimizer it boosted; one rank and one micro-batch in fp32 unless told otherwise."""
    if "microbatch_size" not in settings:
        settings = {"num_microbatches": 1, **settings}
    settings = {"tp_size": 1, "pp_size": 1, "precision": "fp32", **settings}
    booster = Booster(plugin=HybridParallelPlugin(**settings), device=device)
    optimizer = make_optimizer(model.parameters()) if make_optimizer else None
    parts = booster.boost(model, optimizer, sample=sample)
    return booster, parts.model, parts.optimizer


def sgd(parameters: Any) -> torch.optim.Optimizer:
    """Plain gradient descent, large steps."""
    return torch.optim.SGD(parameters, lr=0.1)


def replica_part(batch: Any, replica: int, num_replicas: int) -> Any:
    """One replica's contiguous part of a batch."""
    if isinstance(batch, dict):
        return {name: replica_part(value, replica, num_replicas) for name, value in batch.items()}
    if isinstance(batch, tuple):
        return tuple(replica_part(value, replica, num_replicas) for value in batch)
    if not isinstance(batch, Tensor | list) or (isinstance(batch, Tensor) and batch.dim() == 0):
        return batch
    size = len(batch)
    return batch[replica * size // num_replicas : (replica + 1) * size // num_replicas]


def first_microbatch(batch: Any, settings: dict[str, Any]) -> Any:
    """Of a batch that is cut as ``settings`` say. A model that is boosted with it is not traced for another shape."""
    size = settings.get("microbatch_size")
    count = settings.get("num_microbatches", 1) if size is None else None
    dims = settings.get("batch_dims", 0)
    return (
        split_batch(to_plain_containers(batch), num_microbatches=count, microbatch_size=size, dims=dims)
        .microbatches[0]
        .inputs
    )


def train(
    make_model: Callable[[], nn.Module],
    batches: list[Any],
    *,
    dp_size: int = 1,
    make_optimizer: Callable[[Any], torch.optim.Optimizer] = sgd,
    criterion: Any = model_loss,
    in_order: bool = False,
    after: Callable[[Booster, Any, Any], Any] | None = None,
    **settings: Any,
) -> dict[str, Any]:
    """Train on in-process ranks, one step per batch; ``in_order`` as in Loopback.

    Returns ``losses`` by rank and step; ``weights`` after the last step and ``gradients`` of the first one, whole, by
    name; ``names`` of what each rank owns; ``after``: what ``after(booster, model, optimizer)`` returns on each rank.
    """
    pp_size, tp_size = settings.get("pp_size", 1), settings.get("tp_size", 1)

    def run() -> dict[str, Any]:
        sample = first_microbatch(replica_part(batches[0], 0, dp_size), settings)
        booster, model, optimizer = boosted(make_model(), make_optimizer, sample, **settings)
        replica = booster.plugin.layout.here.dp
        data = iter([replica_part(batch, replica, dp_size) for batch in batches])
        losses, gradients = [], {}
        for step in range(len(batches)):
            losses.append(booster.execute_pipeline(data, model, criterion, optimizer)["loss"].item())
            if step == 0:
                gradients = gradients_of(booster, model)
            optimizer.step()
        with booster.unsharded(model):
            weights = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
        weights, gradients = (whole_over_tp(booster, model, tensors) for tensors in (weights, gradients))
        found = after(booster, model, optimizer) if after else None
        return {"losses": losses, "weights": weights, "gradients": gradients, "after": found}

    ranks = Loopback(pp_size * dp_size * tp_size, in_order=in_order).run(run)
    whole: dict[str, Any] = {"losses": [rank["losses"] for rank in ranks], "weights": {}, "gradients": {}}
    whole["names"] = [set(rank["weights"]) for rank in ranks]
    whole["after"] = [rank["after"] for rank in ranks]
    for rank in ranks:
        whole["weights"].update(rank["weights"])
        whole["gradients"].update(rank["gradients"])
    return whole


_ALONE: dict[Any, Any] = {}


def trained_alone(make_model: Callable[[], nn.Module], batches: list[Any], **settings: Any) -> dict[str, Any]:
    """What :func:`train` gives in one process, made once for the very same batches and equal settings."""
    key = make_model, *map(id, batches), repr(sorted(settings.items(), key=str))
    if key not in _ALONE:
        # The batches, too, so that no others get their ids.
        _ALONE[key] = batches, train(make_model, batches, **settings)
    found: dict[str, Any] = _ALONE[key][1]
    return found


def on_ranks(size: int, run: Callable[[Group], Any]) -> list[Any]:
    """What ``run(group)`` gives on each of as many in-process ranks, which are one group."""

    def rank() -> Any:
        group = current_world().split([list(range(size))])
        assert group is not None
        return run(group)

    return Loopback(size).run(rank)


def gradients_of(booster: Booster, model: nn.Module) -> dict[str, Tensor]:
    """This rank's accumulated gradients, by name."""
    buckets = booster.plugin._engine(model).buckets
    return {name: gradient.clone() for name, gradient in buckets.whole_gradients().items()}


def noted_hooks(monkeypatch: Any) -> list[str]:
    """The names of the parameters whose gradient hooks are called from now on, in order."""
    names: list[str] = []
    before = GradientHooks.call
    monkeypatch.setattr(GradientHooks, "call", lambda self, name: (names.append(name), before(self, name)))
    return names


def whole_over_tp(booster: Booster, model: nn.Module, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Tensors of a rank's parameters, put together with those of the ranks that share its layers.

    What is not divided must be the same, to the bit, on all of them.
    """
    tp = booster.plugin.layout.tp
    if tp.size == 1:
        return tensors
    whole = {}
    for name, tensor in tensors.items():
        parts, placement = tp.all_gather(tensor), sharding_of(model.get_parameter(name))
        whole[name] = parts[0] if placement is None else placement.join(parts)
        if placement is None:
            assert all(torch.equal(part, tensor) for part in parts), f"{name} differs between ranks that share layers"
    return whole


def assert_same(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """Bit-equal, every tensor."""
    assert set(actual) == set(expected)
    for name, tensor in expected.items():
        assert torch.equal(actual[name], tensor), f"{name} differs by {(actual[name] - tensor).abs().max()}"


def assert_near(actual: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float = 1e-6) -> None:
    """Equal to rounding, every tensor."""
    assert set(actual) == set(expected)
    for name, tensor in expected.items():
        torch.testing.assert_close(
            actual[name], tensor, atol=tolerance, rtol=tolerance, msg=lambda m, n=name: f"{n}: {m}"
        )
