"""A run that saves, resumes and stops; for tests and benchmarks of what becomes of it when ranks are killed.

As a script should be: it resumes at the top, computes its layout from the number of ranks, and saves and ends where it
was told to stop. Rank 0 appends a line of JSON per step to ``losses.jsonl``; at the end, every rank writes a digest of
its weights and optimizer state.
"""

import argparse
import hashlib
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from hybridpp_plugins import folder_save
from torch import nn

from hybridpp import Booster, DistCoordinator, HybridParallelPlugin, launch_from_torch
from hybridpp.data_parallel import GradientBuckets
from hybridpp.pipeline import executor

WIDTH, NUM_SAMPLES, BATCH = 16, 96, 8
PLACES = ("receive", "forward", "send", "backward", "reduce", "optimizer step", "save")


class Killer:
    """Kills this process at a place of a step; also what else may happen to it there."""

    def __init__(self, rank: int, place: str, step: int):
        self.rank, self.place, self.step = rank, place, step
        self.now = (-1, 0)

    def at(self, place: str, function: Callable[..., Any], *, after: bool = False) -> Callable[..., Any]:
        """``function``, in which the process is killed."""

        def wrapper(*args: Any, **kwargs: Any) -> Any:
            result = function(*args, **kwargs) if after else None
            # What saves in the background may do so in a later step.
            if self.now[0] == self.rank and self.now[1] >= self.step and place == self.place:
                os.kill(os.getpid(), signal.SIGKILL)
            return result if after else function(*args, **kwargs)

        return wrapper

    def install(self) -> None:
        """Put it in all places."""
        handlers, messages = executor._Handlers, executor.StageMessages
        for name in ("_receive_activations", "_receive_gradients"):
            setattr(handlers, name, self.at("receive", getattr(handlers, name)))
        # In the middle of the action.
        executor._Handlers._plan = self.at("forward", handlers._plan)
        messages.send = self.at("send", messages.send)
        handlers._run_backward = self.at("backward", handlers._run_backward, after=True)
        GradientBuckets.end_backward = self.at("reduce", GradientBuckets.end_backward)
        torch.optim.Adam.step = self.at("optimizer step", torch.optim.Adam.step, after=True)
        for name in ("write_holdings", "write_images"):
            setattr(folder_save, name, self.at("save", getattr(folder_save, name), after=True))


def make_model() -> nn.Module:
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Dropout(0.1)) for _ in range(4)]
    return nn.Sequential(*blocks, nn.Linear(WIDTH, 4))


def layout_for(world_size: int) -> dict[str, int]:
    """Two stages where there are two ranks for them; four micro-batches over all replicas, for equal random numbers."""
    pp_size = 1 + (world_size % 2 == 0)
    return {"tp_size": 1, "pp_size": pp_size, "num_microbatches": 4 * pp_size // world_size}


def run(options: argparse.Namespace) -> None:
    launch_from_torch(backend="gloo", timeout_s=options.timeout, watchdog_s=options.watchdog)
    coordinator = DistCoordinator()
    attempt = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    rank, place, number = options.die.split(":") if options.die else (-1, "", 0)
    killer = Killer(int(rank), place, int(number))
    if options.die and attempt == 0:
        killer.install()
    rows = torch.randn(NUM_SAMPLES, WIDTH, generator=torch.Generator().manual_seed(1))
    data = [{"x": row, "y": index % 4} for index, row in enumerate(rows)]

    plugin = HybridParallelPlugin(**layout_for(coordinator.world_size), max_norm=1.0)
    workers = {"num_workers": options.workers, "multiprocessing_context": "fork" if options.workers else None}
    loader = plugin.prepare_dataloader(data, BATCH // plugin.dp_size, shuffle=True, **workers)
    booster, model = Booster(plugin=plugin, device="cpu"), make_model()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.999)
    model, optimizer, criterion, loader, scheduler = booster.boost(
        model, optimizer, cross_entropy, loader, scheduler, model_inputs={"input": "x"}
    )
    path = Path(options.path)
    (path / f"pid-{coordinator.rank}").write_text(str(os.getpid()))
    resumed = booster.resume(path / "checkpoints", missing="fresh")
    step = resumed.step

    def tell(**values: Any) -> None:
        if coordinator.is_master():
            with open(path / "losses.jsonl", "a") as file:
                file.write(json.dumps({"attempt": attempt, "time": time.time(), **values}) + "\n")

    def save() -> None:
        booster.save(path / "checkpoints", step=step, keep_last=2, asynchronous=options.asynchronous)

    tell(resumed=step)
    epoch = resumed.epoch
    while step < options.steps and not booster.interrupted:
        data_iter = iter(loader)
        for _ in range(resumed.batches if epoch == resumed.epoch else 0, len(loader)):
            killer.now = (coordinator.rank, step)
            loss = booster.execute_pipeline(data_iter, model, criterion, optimizer)["loss"]
            optimizer.step()
            scheduler.step()
            step += 1
            mean = plugin.layout.dp.all_gather(loss.reshape(1))
            tell(step=step, loss=torch.cat(mean).double().mean().item().hex())
            if options.pause:
                time.sleep(options.pause)
            if booster.interrupted or step == options.steps:
                break
            if step % options.save_every == 0:
                save()
        epoch += 1
    (path / f"stopped-{coordinator.rank}").write_text(str(step))
    if booster.interrupted:
        save()
    booster.wait_for_save()
    if options.break_at == "end" and coordinator.rank == 1:
        raise RuntimeError("broken at the end")
    (path / f"weights-{coordinator.rank}").write_text(digest(model, optimizer))
    coordinator.destroy()


def cross_entropy(outputs: torch.Tensor, inputs: Any) -> torch.Tensor:
    return nn.functional.cross_entropy(outputs, inputs["y"])


def digest(model: nn.Module, optimizer: Any) -> str:
    """Of every bit of this rank's weights and optimizer state."""
    found = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        found.update(name.encode() + tensor.numpy().tobytes())
    for state in optimizer.unwrap().state.values():
        for _, value in sorted(state.items()):
            found.update(torch.as_tensor(value).numpy().tobytes())
    return found.hexdigest()


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("path", help="folder of the run")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--save-every", type=int, default=2)
    parser.add_argument("--pause", type=float, default=0.0, help="seconds after each step")
    parser.add_argument("--asynchronous", action="store_true")
    parser.add_argument("--die", help="RANK:PLACE:STEP, in the first attempt")
    parser.add_argument("--break-at", default="")
    parser.add_argument("--timeout", type=float, default=60.0, help="seconds")
    parser.add_argument("--workers", type=int, default=0, help="processes that load data")
    parser.add_argument("--watchdog", type=float, help="seconds")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    run(parse(sys.argv[1:]))
