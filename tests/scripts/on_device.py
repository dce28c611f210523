"""Steps on the pretend accelerator of device_sim.py; saves what happened in each case: ``on_device.py FILE``."""

import sys
import zlib
from typing import Any

import torch
from device_sim import DEVICE, EVENTS
from support import boosted, image_batch, model_loss, replica_part, sgd, tiny_vit, train
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from hybridpp.cluster import Loopback, current_world
from hybridpp.errors import DataError

CASES: dict[str, dict[str, Any]] = {
    "pp": {"pp_size": 2, "schedule": "zb-h1", "precision": "fp16", "max_norm": 1.0},
    "dp": {"dp_size": 2, "precision": "bf16"},
    "zero": {"dp_size": 2, "precision": "bf16", "zero_stage": 1},
}
NUM_STEPS = 2  # The first one does more.


class WithUnused(nn.Module):
    """Has a layer that no batch reaches."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.used, self.unused = nn.Linear(4, 3), nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.used(x)


def small_vit() -> nn.Module:
    return tiny_vit(num_layers=2)


def batch_of(rank_batch: dict[str, torch.Tensor], on_device: bool) -> dict[str, torch.Tensor]:
    return {name: tensor.to(DEVICE) for name, tensor in rank_batch.items()} if on_device else rank_batch


def run(settings: dict[str, Any], *, on_device: bool) -> dict[str, Any]:
    """Steps on each rank: the losses, and the events of the last step."""
    settings = dict(settings)
    dp_size = settings.pop("dp_size", 1)
    size = dp_size * settings.get("pp_size", 1) * settings.get("tp_size", 1)
    # By rank, because ranks take turns within a step.
    found: dict[int, list[Any]] = {rank: [] for rank in range(size)}

    def rank() -> list[float]:
        # Before boost: see device_sim.py.
        model = small_vit().to(DEVICE)
        booster, model, optimizer = boosted(
            model, sgd, image_batch(2), device=str(DEVICE), num_microbatches=3, **settings
        )
        here, losses = current_world().rank, []
        for step in range(NUM_STEPS):
            batch = batch_of(
                replica_part(image_batch(6 * dp_size, step), booster.plugin.layout.here.dp, dp_size), on_device
            )
            current_world().control().all_gather(torch.zeros(1))
            start = len(EVENTS)
            losses.append(booster.execute_pipeline(iter([batch]), model, model_loss, optimizer)["loss"])
            optimizer.step()
            found[here] = [event for event in EVENTS[start:] if event.rank == here]
        return [loss.item() for loss in losses]

    EVENTS.clear()
    losses = Loopback(size).run(rank)
    return {
        "losses": losses,
        "waits": [[event.place for event in found[here] if event.stalls] for here in range(size)],
        "uploads": [sorted({event.place for event in found[here] if event.kind == "upload"}) for here in range(size)],
        "computes": len([event for event in found[0] if event.kind == "compute"]),
    }


def unreached() -> list[list[str]]:
    """Where ranks wait in a step of replicas of which a parameter is reached by none."""
    found: dict[int, list[str]] = {}

    def rank() -> None:
        sample = {"x": torch.ones(2, 4)}
        booster, model, optimizer = boosted(WithUnused().to(DEVICE), sgd, sample, device=str(DEVICE), max_norm=1.0)
        here = current_world().rank
        for step in range(2):
            batch = {"x": torch.full((2, 4), 1.0 + here + step, device=DEVICE)}
            start = len(EVENTS)
            booster.execute_pipeline(iter([batch]), model, lambda y, _: y.square().mean(), optimizer)
            optimizer.step()
            found[here] = [event.place for event in EVENTS[start:] if event.rank == here and event.stalls]

    Loopback(2).run(rank)
    return [found[0], found[1]]


class Counted:
    """A mean over the items that the batch marks."""

    def __call__(self, y: torch.Tensor, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        return (y.square().mean(1) * batch["marked"]).sum() / batch["marked"].sum()

    def num_items(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        return batch["marked"].sum()


def counted() -> list[str]:
    """Where the host waits in a step whose criterion counts items of a batch on the device."""
    criterion = Counted()
    model = nn.Linear(4, 3).to(DEVICE)
    booster, model, optimizer = boosted(model, sgd, torch.ones(2, 4), device=str(DEVICE), num_microbatches=2)
    for _ in range(NUM_STEPS):
        batch = {"input": torch.ones(4, 4, device=DEVICE), "marked": torch.ones(4, device=DEVICE)}
        start = len(EVENTS)
        booster.execute_pipeline(iter([batch]), model, criterion, optimizer)
        optimizer.step()
    return [event.place for event in EVENTS[start:] if event.stalls]


def other_batch() -> str:
    """What two ranks of a pipeline get that hold other values on their devices in the second step."""

    def rank() -> str:
        booster, model, optimizer = boosted(
            small_vit().to(DEVICE), sgd, image_batch(2), device=str(DEVICE), num_microbatches=3, pp_size=2
        )
        for step in range(NUM_STEPS):
            batch = batch_of(image_batch(6, step + (current_world().rank if step == 1 else 0)), True)
            before = {name: tensor.detach().clone() for name, tensor in model.named_parameters()}
            try:
                booster.execute_pipeline(iter([batch]), model, model_loss, optimizer)
            except DataError as error:
                assert step == 1
                optimizer.step()
                same = (bool((tensor == before[name]).all()) for name, tensor in model.named_parameters())
                return f"{error} {all(same)}"
            optimizer.step()
        return "nothing"

    first, second = Loopback(2).run(rank)
    assert first == second
    return first


def mixed() -> str:
    """What an operation on tensors of two devices says."""
    try:
        torch.ones(2, device=DEVICE) + torch.ones(2)
    except RuntimeError as error:
        return str(error)
    return ""


def llama() -> nn.Module:
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=64, tie_word_embeddings=False, use_cache=False, **sizes)).train()


def plan_on_device(device: torch.device) -> dict[str, Any]:
    """Steps of a model on a device, sharded by a plan that is searched there: parameters of rank 0, losses, waits."""
    tokens = torch.arange(24).reshape(2, 12)
    batch = {name: tokens.to(device) for name in ("input_ids", "labels")}
    waits: dict[int, list[str]] = {}

    def rank() -> dict[str, Any]:
        booster, model, optimizer = boosted(llama().to(device), sgd, batch, device=str(device), tp_size=2, max_norm=1.0)
        here, losses = current_world().rank, []
        for _ in range(NUM_STEPS):
            start = len(EVENTS)
            losses.append(booster.execute_pipeline(iter([batch]), model, model_loss, optimizer)["loss"])
            optimizer.step()
            waits[here] = [event.place for event in EVENTS[start:] if event.rank == here and event.stalls]
        parameters = sum(tensor.numel() for tensor in model.parameters())
        return {"parameters": parameters, "losses": [loss.item() for loss in losses]}

    return Loopback(2).run(rank)[0] | {"waits": [waits[0], waits[1]]}


# Buffers that are freed (stage 2) need storages, which tensors of this device do not have.
OFFLOADS = [
    {"precision": "fp32", "zero_stage": 0},
    {"precision": "fp16", "zero_stage": 1, "max_norm": 0.01},
]


def offloaded(settings: dict[str, Any], share: float) -> list[dict[str, Any]]:
    """By rank, of two replicas after some steps: where what lies, losses, and bits of weights and clipped gradients."""

    def rank() -> dict[str, Any]:
        booster, model, optimizer = boosted(
            small_vit().to(DEVICE),
            lambda parameters: torch.optim.AdamW(parameters, lr=0.01),
            image_batch(2),
            device=str(DEVICE),
            num_microbatches=2,
            ddp_bucket_cap_mb=0.01,
            offload_optimizer=share,
            **settings,
        )
        losses = []
        for step in range(2):
            batch = batch_of(replica_part(image_batch(8, step), booster.plugin.layout.here.dp, 2), True)
            losses.append(booster.execute_pipeline(iter([batch]), model, model_loss, optimizer)["loss"].item())
            optimizer.step()
        gradients = {name: gradient.cpu() for name, gradient in optimizer.gradients()}
        updated = [tensor for group in optimizer.param_groups for tensor in group["params"]]
        beside = [
            {value.device.type for value in optimizer.state[tensor].values() if value.dim()} for tensor in updated
        ]
        return {
            "losses": losses,
            "updated": {kind: sum(t.numel() for t in updated if t.device.type == kind) for kind in ("cpu", "gpusim")},
            "moments beside": all(kinds == {t.device.type} for kinds, t in zip(beside, updated, strict=True)),
            "weights": sorted({parameter.device.type for parameter in model.parameters()}),
            "bits": [digest(dict(model.named_parameters())), digest(gradients)],
            "skipped": optimizer.skipped_steps,
        }

    return Loopback(2).run(rank)


def digest(tensors: dict[str, torch.Tensor]) -> int:
    """A number that depends on every bit."""
    held = [tensor.detach().cpu().contiguous().view(-1).view(torch.uint8) for _, tensor in sorted(tensors.items())]
    return zlib.crc32(torch.cat(held).numpy().tobytes())


def results() -> dict[str, Any]:
    """What happened, by case."""
    batches = [[image_batch(size, step) for step in range(NUM_STEPS)] for size in (6, 12)]
    return {
        "mixed": mixed(),
        "expected": [train(small_vit, some, num_microbatches=3)["losses"][0] for some in batches],
        **{case: run(settings, on_device=True) for case, settings in CASES.items()},
        "host batch": run({"pp_size": 2}, on_device=False),
        "search": [plan_on_device(device) for device in (torch.device("cpu"), DEVICE)],
        "unreached": unreached(),
        "counted": counted(),
        "other batch": other_batch(),
        "offloaded": [[offloaded(settings, share) for share in (0.0, 0.5)] for settings in OFFLOADS],
    }


if __name__ == "__main__":
    torch.save(results(), sys.argv[1])
