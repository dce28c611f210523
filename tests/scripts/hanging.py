"""A job of four ranks that hangs in its third step (or pauses), and is watched: ``hanging.py WHAT RANK WHERE [k=v]``.

WHAT: sleep, stop, hold (code in C that keeps the interpreter), cut (the cable of its host), kill, or none. WHERE: an
action (``1F2``), ``loader``, ``script`` or ``trace``. Keys: ``limit`` and others of ``watchdog_s`` in seconds,
``steps``, and ``pause``, the seconds of a sleep.
"""

import ctypes
import os
import signal
import subprocess
import sys
import time

import torch
from torch import nn
from torch.utils.data import Dataset

from hybridpp import Booster, HybridParallelPlugin, launch_from_torch
from hybridpp.cluster import current_world
from hybridpp.pipeline import executor

WHAT, RANK, WHERE = sys.argv[1], int(sys.argv[2]), sys.argv[3]
SETTINGS = {key: float(value) for key, value in (each.split("=") for each in sys.argv[4:])}
STEPS, PAUSE = int(SETTINGS.pop("steps", 4)), SETTINGS.pop("pause", 1000.0)
PP, TP = int(SETTINGS.pop("pp", 2)), int(SETTINGS.pop("tp", 1))
HANG_AT = int(SETTINGS.pop("at", 2))
step, is_boosting = -1, False


def hang() -> None:
    print(f"HANGS {time.time():.3f}", flush=True)
    match WHAT:
        case "sleep":
            time.sleep(PAUSE)
        case "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        case "hold":
            ctypes.PyDLL(None).sleep(int(PAUSE))
        case "cut":
            subprocess.run(["ip", "link", "set", "cable", "down"], check=True)
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)


def may_hang(where: str) -> None:
    if step == HANG_AT and where == WHERE and RANK in (-1, current_world().rank) and WHAT != "none":
        hang()


class Images(Dataset[dict[str, torch.Tensor]]):
    def __len__(self) -> int:
        return 1000

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        may_hang("loader")
        return {"x": torch.full((8,), index / 1000)}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(x)))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if is_boosting:
            may_hang("trace")
        for block in self.blocks:
            x = block(x)
        return x


def instrument() -> None:
    by_kind = executor._Handlers.by_kind

    def run(handler, action):
        may_hang(str(action))
        handler(action)

    def wrapped(self):
        return {kind: (lambda action, handler=handler: run(handler, action)) for kind, handler in by_kind(self).items()}

    executor._Handlers.by_kind = wrapped


def criterion(outputs: torch.Tensor, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    return outputs.square().mean()


def main() -> None:
    global step, is_boosting
    limit = SETTINGS.pop("limit", 3.0)
    if "AGENT_PORT" in os.environ:  # of a store that outlives the ranks, as that of torchrun's agent
        os.environ["MASTER_PORT"] = os.environ["AGENT_PORT"]
    launch_from_torch(backend="gloo", seed=7, timeout_s=300, watchdog_s={"step": limit, **SETTINGS})
    instrument()
    plugin = HybridParallelPlugin(tp_size=TP, pp_size=PP, num_microbatches=4, max_norm=1.0)
    loader = plugin.prepare_dataloader(Images(), batch_size=8)
    model = Model()
    booster = Booster(plugin=plugin)
    step, is_boosting = HANG_AT if WHERE == "trace" else -1, True
    model, optimizer, *_ = booster.boost(model, torch.optim.AdamW(model.parameters()), criterion, loader)
    is_boosting = False
    batches = iter(loader)
    for step in range(STEPS):  # noqa: B007
        booster.execute_pipeline(batches, model, criterion, optimizer)
        optimizer.step()
        may_hang("script")
    step = -1
    print(f"DONE {current_world().rank}", flush=True)


main()
