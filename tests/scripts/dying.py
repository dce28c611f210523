"""A short life of a job, of whose ranks one is killed (SIGKILL) at a place: ``dying.py LAYOUT PLACE RANK FOLDER``.

It joins, boosts, trains, saves, resumes, evaluates, saves in the background and ends, as scripts do. The killed rank
writes when that was (``time.monotonic``) to ``FOLDER/killed``. ``none`` as the place: nobody is killed.
"""

import functools
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from hybridpp_plugins import folder_save, run_resume
from hybridpp_plugins.layout import Layout
from torch import nn

from hybridpp import Booster, DistCoordinator, HybridParallelPlugin, launch, launch_from_torch
from hybridpp.cluster import gather_numbers, join, rendezvous
from hybridpp.cluster.torch_world import TorchWorld
from hybridpp.data_parallel import GradientBuckets
from hybridpp.pipeline import executor

LAYOUTS: dict[str, dict[str, Any]] = {
    "dp2": {"ranks": 2},
    "pp2": {"ranks": 2, "pp_size": 2},
    "tp2": {"ranks": 2, "tp_size": 2},
    "tp2 pp2": {"ranks": 4, "tp_size": 2, "pp_size": 2},
    "pp2 dp2": {"ranks": 4, "pp_size": 2},
    "dp4 zero 3": {"ranks": 4, "zero_stage": 3},
}
PLACES = (
    "rendezvous",
    "connection",
    "boost",
    "first step",
    "forward",
    "backward",
    "reduction",
    "exchange",
    "optimizer step",
    "save",
    "background save",
    "resume",
    "evaluation",
    "between steps",
    "exit",
)
NUM_MICROBATCHES = 4


class Killer:
    """Kills this process when it comes to a place, in the part of the job that the script has reached."""

    def __init__(self, place: str, folder: Path):
        self.place, self.folder = place, folder
        self.part = "launch"

    def at(self, place: str, part: str = "") -> None:
        """This process is at a place; ``part``: where alone that counts."""
        if place == self.place and part in ("", self.part):
            (self.folder / "killed").write_text(str(time.monotonic()))
            os.kill(os.getpid(), signal.SIGKILL)

    def hook(self, owner: Any, name: str, place: str, part: str = "", *, after: bool = False) -> None:
        """Kill this process where a function is called, or ``after`` the call."""
        function = getattr(owner, name)

        @functools.wraps(function)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            if not after:
                self.at(place, part)
            result = function(*args, **kwargs)
            if after:
                self.at(place, part)
            return result

        setattr(owner, name, wrapper)

    def install(self, rank: int) -> None:
        """Put it in all places of the library."""
        # When this rank has told the others that it is there.
        self.hook(*((join, "_decide") if rank == 0 else (rendezvous, "_decision_key")), "rendezvous")
        self.hook(join.dist, "init_process_group", "connection")
        self.hook(Layout, "connect", "boost")
        self.hook(executor._Handlers, "_run_backward", "backward", "step", after=True)
        self.hook(GradientBuckets, "end_backward", "reduction", "step")
        self.hook(gather_numbers_module.PendingNumbers, "_receive", "exchange", "step")
        self.hook(torch.optim.Adam, "step", "optimizer step", "step", after=True)
        self.hook(folder_save, "write_holdings", "save", after=True)
        self.hook(folder_save, "write_images", "background save", after=True)
        self.hook(run_resume, "fill", "resume")
        self.hook(TorchWorld, "leave", "exit")


gather_numbers_module = sys.modules[gather_numbers.__module__]


class Block(nn.Module):
    def __init__(self, reached: Callable[[], None]):
        super().__init__()
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)
        self.reached = reached

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.reached()
        return x + self.down(torch.tanh(self.up(x)))


def mean_square(outputs: torch.Tensor, inputs: Any) -> torch.Tensor:
    return outputs.square().mean()


def main() -> None:
    name, place, victim, folder = sys.argv[1], sys.argv[2], int(sys.argv[3]), Path(sys.argv[4])
    settings = dict(LAYOUTS[name])
    rank = int(os.environ["RANK"])
    killer = Killer(place if rank == victim else "none", folder)
    killer.install(rank)
    timeout_s = float(os.environ.get("DYING_TIMEOUT_S", "600"))
    if "TORCHELASTIC_RUN_ID" in os.environ:
        launch_from_torch(backend="gloo", timeout_s=timeout_s)
    else:
        port = int(os.environ["MASTER_PORT"])
        launch(rank, settings["ranks"], "127.0.0.1", port, backend="gloo", timeout_s=timeout_s)
    del settings["ranks"]
    if "tp_size" in settings:
        settings["tensor_parallel_plan"] = {"*.up": "column", "*.down": "row"}
    coordinator = DistCoordinator()

    def reached() -> None:
        for one, part in (("first step", "first step"), ("forward", "step"), ("evaluation", "evaluation")):
            killer.at(one, part)

    torch.manual_seed(0)
    model = nn.Sequential(*(Block(reached) for _ in range(4)), nn.Linear(16, 4))
    plugin = HybridParallelPlugin(num_microbatches=NUM_MICROBATCHES, **settings)
    booster = Booster(plugin=plugin, device="cpu")
    loader = plugin.prepare_dataloader(list(torch.randn(640, 16)), batch_size=8)
    killer.part = "boost"
    model, optimizer, criterion, loader, _ = booster.boost(
        model, torch.optim.Adam(model.parameters()), mean_square, loader
    )
    batches = iter(loader)

    def step(part: str) -> None:
        killer.part = part
        booster.execute_pipeline(batches, model, criterion, optimizer)
        optimizer.step()

    step("first step")
    booster.save(folder / "run", step=1)
    booster.resume(folder / "run")
    batches = iter(loader)
    killer.part = "evaluation"
    with torch.no_grad():
        booster.execute_pipeline(iter(loader), model, criterion)
    booster.save(folder / "run", step=2, asynchronous=True)
    step("beside the save")
    booster.wait_for_save()
    killer.at("between steps")
    step("step")
    step("after it")
    killer.part = "end"
    coordinator.destroy()


if __name__ == "__main__":
    main()
