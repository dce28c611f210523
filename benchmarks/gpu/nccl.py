"""Whether pipelines run over NCCL: every schedule, one micro-batch first, in jobs that are ended after 60 s.

    PYTHONPATH=.:plugins python benchmarks/gpu/nccl.py

A line of JSON per job: ``"ok"``, ``"hang"`` (it took longer), ``"wrong"`` (its losses are not those of one process on
the CPU) or ``"error"``. With one device only a job of one rank runs, and a line says so. ``--device cpu --tiny`` runs
the first jobs over gloo, to show that this script works.
"""

import argparse
import json
import os
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from jobs import LIMIT_S, outcome
from loops import Job
from report import header, table, tell

from hybridpp import Booster, DistCoordinator, HybridParallelPlugin, launch_from_torch

SCHEDULES = ("1f1b", "gpipe", "interleaved", "zb-h1", "zb-h2", "interleaved-zb", "zb-v", "v-half", "v-min")
NUM_STEPS, NUM_SAMPLES = 3, 4
TOLERANCE = 1e-3


@dataclass(frozen=True)
class Case:
    """A job.

    Attributes:
        name: in the report.
        num_ranks: of it.
        arguments: of the worker.
        environment: of its processes.
    """

    name: str
    num_ranks: int
    arguments: tuple[str, ...]
    environment: dict[str, str] = field(default_factory=dict)


def cases(num_devices: int) -> Iterator[Case]:
    """The jobs for a host, those first that would hang first."""
    yield Case("one rank", 1, ("--microbatches", "2"))
    if num_devices < 2:
        return
    num_ranks = 4 if num_devices >= 4 else 2
    variants: list[tuple[str, tuple[str, ...], dict[str, str]]] = [
        ("lazy modules", (), {"CUDA_MODULE_LOADING": "LAZY"}),
        ("eager modules", (), {"CUDA_MODULE_LOADING": "EAGER"}),
        ("device_id", ("--bind",), {}),
        ("one queue", (), {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}),
    ]
    for count in (1, 4):
        for what, more, environment in variants:
            for schedule in SCHEDULES:
                arguments = ("--schedule", schedule, "--microbatches", str(count), "--pp-size", str(num_ranks), *more)
                yield Case(f"{schedule}, {count} micro-batches, {what}", num_ranks, arguments, environment)
    yield Case("tp", 2, ("--tp-size", "2", "--microbatches", "2"))
    yield Case("dp", num_ranks, ("--microbatches", "2"))


def losses_of(args: argparse.Namespace) -> list[float]:
    """Losses of a few steps on this rank; every replica trains on the same batch."""
    plugin = HybridParallelPlugin(
        tp_size=args.tp_size, pp_size=args.pp_size, num_microbatches=args.microbatches, schedule=args.schedule
    )
    job = Job(size="tiny", num_samples=NUM_SAMPLES, num_microbatches=args.microbatches, device=args.device)
    model = job.model()
    booster = Booster(plugin=plugin, device=args.device)
    boosted = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1), lambda outputs, inputs: outputs.loss)
    losses = []
    for step in range(NUM_STEPS):
        torch.manual_seed(step)
        batch = job.batch("cpu")
        result = booster.execute_pipeline(iter([batch]), boosted.model, boosted.criterion, boosted.optimizer)
        losses.append(result["loss"].item())
        boosted.optimizer.step()
    return losses


def worker(args: argparse.Namespace) -> None:
    """One rank of a job; rank 0 prints the losses."""
    # cuDNN would round fp32 to TF32.
    torch.backends.cudnn.allow_tf32 = False
    if args.bind:
        # As scripts do that use torch.distributed themselves.
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if args.device == "cuda" else None
        dist.init_process_group("gloo" if device is None else "nccl", device_id=device)
    else:
        launch_from_torch(backend="nccl" if args.device == "cuda" else "gloo")
    coordinator = DistCoordinator()
    coordinator.print_on_master(json.dumps(losses_of(args)))
    coordinator.destroy()


def judged(status: str, output: str, expected: Sequence[float]) -> dict[str, Any]:
    """What is told of a job."""
    found = [json.loads(line) for line in output.splitlines() if line.startswith("[") and line.endswith("]")]
    if status == "ok" and not found:
        return {"result": "error", "said": output[-400:]}
    if status != "ok":
        return {"result": status, "said": output[-400:]}
    worst = max(abs(loss - other) for loss, other in zip(found[-1], expected, strict=True))
    return {"result": "ok" if worst < TOLERANCE else "wrong", "largest difference": worst}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", help="(default: %(default)s)")
    parser.add_argument("--tiny", action="store_true", help="the first two jobs only")
    parser.add_argument("--limit", type=float, default=LIMIT_S, help="seconds for a job (default: %(default)s)")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--bind", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--schedule", default="1f1b", help=argparse.SUPPRESS)
    for name in ("--microbatches", "--pp-size", "--tp-size"):
        parser.add_argument(name, type=int, default=1, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        worker(args)
        return
    num_devices = torch.cuda.device_count() if args.device == "cuda" else 2
    tell("nccl", "header", header())
    if num_devices < 2:
        tell("nccl", "several ranks", {"result": "skipped", "said": f"{num_devices} device of 2"})
    # By the number of micro-batches, which changes how sums are rounded, and nothing else.
    args.device, device = "cpu", args.device
    expected = losses_of(args)
    lines = []
    for number, case in enumerate(cases(num_devices)):
        if args.tiny and number == 2:
            break
        run = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(case.num_ranks)]
        start = time.monotonic()
        status, output = outcome(
            [*run, __file__, "--worker", "--device", device, *case.arguments], case.environment, args.limit
        )
        numbers = judged(status, output, expected) | {"seconds": round(time.monotonic() - start, 1)}
        tell("nccl", case.name, numbers)
        lines.append({"case": case.name, **numbers})
    print(f"\n{table(lines)}", flush=True)


if __name__ == "__main__":
    main()
