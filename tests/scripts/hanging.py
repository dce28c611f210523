"""A job of four ranks that hangs in its third step (or pauses), and is watched: ``hanging.py WHAT RANK WHERE [k=v]``.

WHAT: sleep, stop, hold (code in C that keeps the interpreter), lock (one that nobody gives back), disk (a wait of the
kernel that nothing interrupts), cut (the cable of its host), kill, or none. WHERE:

- an action (``1F2``), ``loader``, ``script`` or ``trace``;
- ``worker``: a process that loads data, of which there are two;
- ``launch``, ``connect``, ``group``: where ranks meet, where they connect, and where a plugin makes groups of them;
- ``constructor``: of the model, before it is boosted;
- ``state_dict``, ``save``, ``background``, ``remote``: in a save after the third step, in the model's own code, where a
  rank writes, where its thread does, and in a file system of ``fsspec``;
- ``resume``, ``fifo``: in the model's own code while a run is resumed from that save, and where the rank's file is
  opened (whatever WHAT is, as the file is a FIFO).

Keys: ``limit`` and others of ``watchdog_s`` in seconds (``watched=0``: there is no watchdog), ``timeout`` of the job,
``steps``, ``pause``, the seconds of a sleep, and ``own=1``: the dataloader is torch's.
"""

import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import fsspec
import torch
import torch.distributed as dist
from fsspec.implementations.local import LocalFileSystem
from hybridpp_plugins import folder_save
from torch import nn
from torch.utils.data import DataLoader, Dataset, get_worker_info

from hybridpp import Booster, HybridParallelPlugin, launch_from_torch
from hybridpp.cluster import current_world, rendezvous
from hybridpp.pipeline import executor

WHAT, RANK, WHERE = sys.argv[1], int(sys.argv[2]), sys.argv[3]
SETTINGS = {key: float(value) for key, value in (each.split("=") for each in sys.argv[4:])}
STEPS, PAUSE = int(SETTINGS.pop("steps", 4)), SETTINGS.pop("pause", 1000.0)
PP, TP = int(SETTINGS.pop("pp", 2)), int(SETTINGS.pop("tp", 1))
HANG_AT = int(SETTINGS.pop("at", 2))
IS_OWN, IS_WATCHED = bool(SETTINGS.pop("own", 0)), bool(SETTINGS.pop("watched", 1))
WAITS = bool(SETTINGS.pop("wait", 1))
TIMEOUT = SETTINGS.pop("timeout", 300.0)
SAVES, RESUMES = ("state_dict", "save", "background", "remote"), ("resume", "fifo")
# linux/sched.h
CLONE_VM, CLONE_VFORK = 0x100, 0x4000
step, is_boosting, has_hung = -1, False, False


def hang() -> None:
    global has_hung
    has_hung = True
    print(f"HANGS {time.time():.3f}", flush=True)
    match WHAT:
        case "sleep":
            time.sleep(PAUSE)
        case "lock":
            lock = threading.Lock()
            lock.acquire()
            lock.acquire()
        case "disk":
            # Until a child ends that shares the memory: as where a disk does not answer, no signal but SIGKILL counts.
            libc, stack = ctypes.CDLL(None), ctypes.create_string_buffer(65536)
            top = ctypes.c_void_p((ctypes.addressof(stack) + 65536) & ~15)
            wait = ctypes.cast(libc.sleep, ctypes.c_void_p)
            libc.clone(wait, top, CLONE_VM | CLONE_VFORK | signal.SIGCHLD, ctypes.c_void_p(20))
        case "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        case "hold":
            ctypes.PyDLL(None).sleep(int(PAUSE))
        case "cut":
            subprocess.run(["ip", "link", "set", "cable", "down"], check=True)
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)


def may_hang(where: str, at: int | None = None) -> None:
    is_here = RANK in (-1, int(os.environ["RANK"])) and where == WHERE and WHAT != "none"
    if is_here and (step if at is None else at) == HANG_AT and not has_hung:
        hang()


class Images(Dataset[dict[str, torch.Tensor]]):
    num_loaded = 0

    def __len__(self) -> int:
        return 1000

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        may_hang("loader")
        if get_worker_info() is not None:
            # In the third batch: the second one of the first worker.
            self.num_loaded += 1
            may_hang("worker", HANG_AT if get_worker_info().id == 0 and self.num_loaded == 9 else -1)
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
        may_hang("constructor", HANG_AT)
        self.blocks = nn.ModuleList(Block() for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if is_boosting:
            may_hang("trace")
        for block in self.blocks:
            x = block(x)
        return x

    def get_extra_state(self) -> int:
        may_hang("state_dict")
        return 1

    def set_extra_state(self, state: int) -> None:
        may_hang("resume")


class Files(LocalFileSystem):
    """A file system of ``fsspec`` that hangs where it writes."""

    protocol = "hanging"

    def pipe_file(self, path: str, value: bytes, **options: Any) -> None:
        may_hang("remote")
        super().pipe_file(path, value, **options)

    def put_file(self, *args: Any, **options: Any) -> None:
        may_hang("remote")
        super().put_file(*args, **options)


def hanging(where: str, function, at: int | None = None):
    def run(*args, **options):
        may_hang(where, at)
        return function(*args, **options)

    return run


def instrument() -> None:
    by_kind = executor._Handlers.by_kind

    def run(handler, action):
        may_hang(str(action))
        handler(action)

    def wrapped(self):
        return {kind: (lambda action, handler=handler: run(handler, action)) for kind, handler in by_kind(self).items()}

    executor._Handlers.by_kind = wrapped
    fsspec.register_implementation("hanging", Files)
    folder_save.write_holdings = hanging("save", folder_save.write_holdings)
    folder_save.write_images = hanging("background", folder_save.write_images, HANG_AT)


def criterion(outputs: torch.Tensor, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    return outputs.square().mean()


def save_or_resume(booster: Booster) -> None:
    path = os.environ["FOLDER"]
    is_remote = WHERE == "remote"
    booster.save(f"hanging://{path}" if is_remote else path, step=step, asynchronous=WHERE == "background")
    if WHERE in RESUMES:
        current_world().control().all_gather(torch.zeros(1))
        if WHERE == "fifo" and current_world().rank == RANK:
            (file,) = Path(path).glob(f"*/rank-{RANK:05d}*.safetensors")
            file.unlink()
            os.mkfifo(file)
            print(f"HANGS {time.time():.3f}", flush=True)
        current_world().control().all_gather(torch.zeros(1))
        booster.resume(path)


def main() -> None:
    global step, is_boosting
    limit = SETTINGS.pop("limit", 3.0)
    if "AGENT_PORT" in os.environ:  # of a store that outlives the ranks, as that of torchrun's agent
        os.environ["MASTER_PORT"] = os.environ["AGENT_PORT"]
    # On another rank than 0.
    rendezvous._await = hanging("launch", rendezvous._await, HANG_AT)
    dist.init_process_group = hanging("connect", dist.init_process_group, HANG_AT)
    watchdog_s = {"step": limit, **SETTINGS} if IS_WATCHED else None
    launch_from_torch(backend="gloo", seed=7, timeout_s=TIMEOUT, watchdog_s=watchdog_s)
    instrument()
    dist.new_group = hanging("group", dist.new_group, HANG_AT)
    plugin = HybridParallelPlugin(tp_size=TP, pp_size=PP, num_microbatches=4, max_norm=1.0)
    workers = {"num_workers": 2, "multiprocessing_context": "fork", "persistent_workers": True}
    make = DataLoader if IS_OWN else plugin.prepare_dataloader
    loader = make(Images(), batch_size=8, **(workers if WHERE == "worker" else {}))
    model = Model()
    booster = Booster(plugin=plugin)
    step, is_boosting = HANG_AT if WHERE == "trace" else -1, True
    model, optimizer, *_ = booster.boost(model, torch.optim.AdamW(model.parameters()), criterion, loader)
    is_boosting = False
    batches = iter(loader)
    for step in range(STEPS):
        booster.execute_pipeline(batches, model, criterion, optimizer)
        optimizer.step()
        may_hang("script")
        if step == HANG_AT and WHERE in (*SAVES, *RESUMES):
            save_or_resume(booster)
    if WAITS:
        booster.wait_for_save()
    step = -1
    print(f"DONE {current_world().rank}", flush=True)


main()
