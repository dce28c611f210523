r"""Checkpoints of runs against torch.save and torch.distributed.checkpoint (DCP); a step beside a background save.

    OMP_NUM_THREADS=1 PYTHONPATH=.:plugins python benchmarks/checkpoints.py --folder /dev/shm
    OMP_NUM_THREADS=1 PYTHONPATH=.:plugins torchrun --standalone --nproc-per-node 2 \
        benchmarks/checkpoints.py --beside dp2

One process, 24 linear layers of 1024 x 1024 with AdamW in fp32 (288 MiB with the moments). Every round runs each
variant once, in a new random order, and removes what it wrote. All variants sync their files; the loads of
booster.resume include the comparison with digests, which the others do not have. Steps beside a save are those until
every rank has written its part, against as many alone. Then each rank of a model sharded over 8 tensor-parallel ranks
reads its part of a checkpoint that one process wrote.
"""

import argparse
import os
import random
import shutil
import statistics
import tempfile
import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from hybridpp_plugins import background_save
from torch import nn

from hybridpp import Booster, DistCoordinator, HybridParallelPlugin, launch_from_torch
from hybridpp.checkpoint.boxes import shard_regions
from hybridpp.checkpoint.commit import open_step, step_folder
from hybridpp.checkpoint.reader import fill, plan_reads
from hybridpp.checkpoint.writer import Holding

WIDTH, NUM_LAYERS, BATCH = 1024, 24, 256
LAYOUTS = {"one": {}, "dp2": {}, "pp2": {"pp_size": 2, "num_microbatches": 4}}


class Job:
    """A model that has taken a step, and ways to save and load it."""

    def __init__(self, **settings: Any) -> None:
        torch.manual_seed(0)
        self.plugin = HybridParallelPlugin(**settings)
        self.booster = Booster(plugin=self.plugin)
        self.control, self.rank = self.plugin.layout.control, self.plugin.layout.world.rank
        model = nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(NUM_LAYERS)])
        self.nbytes = 3 * sum(parameter.nbytes for parameter in model.parameters())
        self.batch = torch.randn(BATCH // self.plugin.dp_size, WIDTH)
        parts = self.booster.boost(model, torch.optim.AdamW(model.parameters(), lr=1e-3), sample=self.batch[:2])
        self.model, self.optimizer = parts.model, parts.optimizer
        self.step()

    def step(self) -> None:
        self.booster.execute_pipeline(iter([self.batch]), self.model, self.loss, self.optimizer)
        self.optimizer.step()

    @staticmethod
    def loss(outputs: torch.Tensor, inputs: torch.Tensor) -> torch.Tensor:
        return outputs.square().mean()

    def is_saving(self) -> bool:
        """Whether a rank still writes; the same on every rank."""
        own = any(thread.name.startswith("hybridpp save") for thread in threading.enumerate())
        return bool(sum(part.item() for part in self.control.all_gather(torch.tensor(float(own)))))

    def remove(self, path: Path) -> None:
        self.is_saving()  # all ranks are here
        if self.rank == 0:
            shutil.rmtree(path)
        self.is_saving()

    def state(self) -> dict[str, Any]:
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.unwrap().state_dict()}

    def torch_save(self, path: Path) -> None:
        path.mkdir()
        with (path / "state.pt").open("wb") as file:
            torch.save(self.state(), file)
            file.flush()
            os.fsync(file.fileno())

    def torch_load(self, path: Path) -> None:
        state = torch.load(path / "state.pt", weights_only=True)
        self.model.load_state_dict(state["model"])
        self.optimizer.unwrap().load_state_dict(state["optimizer"])

    def variants(self) -> dict[str, tuple[Callable[[Path], Any], Callable[[Path], Any]]]:
        return {
            "booster": (lambda path: self.booster.save(path, step=1), self.booster.resume),
            "torch.save": (self.torch_save, self.torch_load),
            "DCP": (
                lambda path: dcp.save(self.state(), checkpoint_id=path, no_dist=True),
                lambda path: dcp.load(self.state(), checkpoint_id=path, no_dist=True),
            ),
        }


def seconds(call: Callable[[], Any]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def saves_and_loads(job: Job, folder: Path, rounds: int) -> None:
    times: dict[tuple[str, str], list[float]] = {}
    for _ in range(rounds):
        variants = list(job.variants().items())
        random.shuffle(variants)
        for name, (save, load) in variants:
            path = folder / name
            times.setdefault((name, "save"), []).append(seconds(lambda: save(path)))  # noqa: B023
            times.setdefault((name, "load"), []).append(seconds(lambda: load(path)))  # noqa: B023
            shutil.rmtree(path)
    for what in ("save", "load"):
        for name in job.variants():
            median = statistics.median(times[name, what])
            ratio = statistics.median(times["booster", what]) / median
            print(
                f"{what} {name:10} {median:6.3f} s {job.nbytes / median / 2**20:6.0f} MiB/s   booster / it {ratio:.2f}"
            )


class Beside:
    """Steps while a save writes, against as many alone just after.

    Attributes:
        ratios: of a step beside a save to one alone, per round.
        durations: of the saves, in seconds.
        calls: of ``booster.save``, in seconds.
        processor: seconds that the save adds to the process, besides its call.
    """

    def __init__(self) -> None:
        self.ratios: list[float] = []
        self.durations: list[float] = []
        self.calls: list[float] = []
        self.processor: list[float] = []

    def measure(self, job: Job, path: Path) -> None:
        """One round."""
        self.calls.append(seconds(lambda: job.booster.save(path, step=1, asynchronous=True)))
        beside, begin, start = [], time.process_time(), time.perf_counter()
        while job.is_saving():
            beside.append(seconds(job.step))
        middle = time.process_time()
        self.durations.append(time.perf_counter() - start)
        alone = [seconds(job.step) for _ in beside if not job.is_saving()]  # ranks meet before each step, too
        self.processor.append(2 * middle - begin - time.process_time())
        job.booster.wait_for_save()
        job.remove(path)
        self.ratios.append(statistics.mean(beside) / statistics.mean(alone))

    def __str__(self) -> str:
        ratio, processor, duration, call = map(
            statistics.median, (self.ratios, self.processor, self.durations, self.calls)
        )
        quarter = statistics.quantiles(self.ratios, n=4) if len(self.ratios) > 1 else self.ratios * 3
        return (
            f"a step beside a save / a step alone {ratio:.3f} (quarters {quarter[0]:.3f} to {quarter[2]:.3f}, all "
            f"{min(self.ratios):.3f} to {max(self.ratios):.3f}); written after {duration:.2f} s, with "
            f"{processor:.3f} s of the processor; the call {call:.3f} s"
        )


def steps_beside_a_save(job: Job, folder: Path, rounds: int) -> None:
    """With shares of the processors for the thread that writes, in turn: that of saves, twice that, and all of it."""
    usual = background_save._SHARE
    shares = {"paced": usual, "twice that": 2 * usual, "at once": 1e9}
    found = {name: Beside() for name in shares}
    order = random.Random(0)  # that of all ranks
    for _ in range(rounds):
        names = list(shares)
        order.shuffle(names)
        for name in names:
            background_save._SHARE = shares[name]
            found[name].measure(job, folder / "async")
    background_save._SHARE = usual
    if job.rank == 0:
        for name, beside in found.items():
            print(f"{name:12} {beside}", flush=True)


def bytes_read(job: Job, folder: Path) -> None:
    """By each of 8 ranks that shard the layers by their outputs."""
    job.booster.save(folder / "reads", step=1)
    manifest = open_step(folder / "reads", 1)
    read = owned = 0
    for rank in range(8):
        holdings = []
        for key, entry in manifest.tensors.items():
            (region,) = shard_regions(entry.shape, 0, [(entry.shape[0], 1)], rank, 8, first_copies=False)
            target = torch.empty(region.box.shape)
            holdings.append(Holding(key, target.dtype, entry.shape, [(region.box, target)]))
            owned += target.nbytes
        reads = plan_reads(manifest.tensors, holdings)
        read += sum(planned.source.size * 4 for planned in reads)
        fill(step_folder(folder / "reads", 1), reads)
    print(f"8 ranks read {read / 2**20:.1f} MiB and own {owned / 2**20:.1f} MiB: {read / owned:.3f}")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", help="where to write; default: the folder for temporary files")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--beside", choices=LAYOUTS, help="only steps beside saves, in this layout, under torchrun")
    parser.add_argument("--only-saves", action="store_true", help="only saves and loads, on one process")
    args = parser.parse_args()
    warnings.filterwarnings("ignore", "torch.distributed is disabled")
    if args.beside:
        launch_from_torch(seed=0)
        job = Job(**LAYOUTS[args.beside])
        steps_beside_a_save(job, Path(args.folder or tempfile.gettempdir()) / "hybridpp-beside", args.rounds)
        DistCoordinator().destroy()
        return
    job, folder = Job(), Path(tempfile.mkdtemp(dir=args.folder))
    try:
        saves_and_loads(job, folder, args.rounds)
        if args.only_saves:
            return
        steps_beside_a_save(job, folder, args.rounds)
        bytes_read(job, folder)
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
