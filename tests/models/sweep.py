"""Cut every architecture of transformers' registry and compare each gradient with the whole model's."""

import argparse
import copy
import json
import multiprocessing
import os
import resource
import time
import traceback
from collections.abc import Iterator
from multiprocessing.connection import Connection, wait
from pathlib import Path

import torch
from models.table import LAYOUTS, Layout, Result, page
from models.zoo import Architecture, DoesNotBuild, Specimen, architectures, build, criterion, plain_step
from support import boosted, gradients_of, sgd
from torch import Tensor

from hybridpp.cluster import Loopback
from hybridpp.partition.blocks import finest_units
from hybridpp.partition.intercept import Interceptor
from hybridpp.partition.survey import survey

TIME_LIMIT_S, MEMORY_GIB = 400.0, 10


def staged_step(specimen: Specimen, layout: Layout) -> tuple[float, dict[str, Tensor], list[tuple[int, int]]]:
    """Loss, gradients, and of each rank but the first the number of values that reach it and their bytes per sample."""
    chunks = {"schedule": "gpipe", "num_model_chunks": layout.num_chunks} if layout.num_chunks > 1 else {}

    def run() -> tuple[float, dict[str, Tensor], tuple[int, int]]:
        model = copy.deepcopy(specimen.model)
        options = {"pp_size": layout.pp_size, "num_microbatches": 2, **chunks}
        booster, model, optimizer = boosted(model, sgd, specimen.batch, **options)
        loss = booster.execute_pipeline(iter([specimen.batch]), model, criterion, optimizer)["loss"].item()
        staged = booster.plugin._engine(model).staged
        samples = len(next(iter(specimen.batch.values()))) // 2
        plans = next(iter(staged._plans.values()), {})
        specs = [spec for plan in plans.values() for spec in plan.incoming_specs]
        size = sum(torch.Size(spec.shape).numel() * spec.dtype.itemsize for spec in specs) // samples
        return loss, gradients_of(booster, model), (len(specs), size)

    ranks = Loopback(layout.pp_size).run(run)
    gradients: dict[str, Tensor] = {}
    for _, owned, _ in ranks:
        gradients.update(owned)
    return ranks[-1][0], gradients, [crossing for *_, crossing in ranks[1:]]


def compare(specimen: Specimen, layout: Layout, expected: tuple[Tensor, dict[str, Tensor]]) -> Result:
    """What comes of cutting a model so: right, or what is wrong."""
    start = time.process_time()
    try:
        loss, gradients, crossing = staged_step(specimen, layout)
    except Exception as error:
        text = " ".join(str(error).split())
        return {"right": False, "error": f"{type(error).__name__}: {text}", "traceback": traceback.format_exc()}
    whole_loss, whole = expected
    wrong = [] if abs(loss - float(whole_loss)) <= 1e-6 + 1e-5 * abs(float(whole_loss)) else [f"loss {loss}"]
    for name, parameter in specimen.model.named_parameters():
        if not parameter.requires_grad:
            continue
        gradient = whole.get(name, torch.zeros_like(parameter))
        if name not in gradients:
            wrong.append(f"{name} is missing")
        elif not torch.allclose(gradients[name], gradient, atol=1e-6, rtol=1e-5):
            wrong.append(
                f"{name} differs by {(gradients[name] - gradient).abs().max():.1e} of {gradient.abs().max():.1e}"
            )
    seconds = time.process_time() - start
    result: Result = {"right": not wrong, "crossing": crossing, "seconds": seconds}
    if wrong:
        result["error"] = f"{len(wrong)} of {len(whole)} gradients differ: {'; '.join(wrong[:3])}"
    return result


def examine(architecture: Architecture) -> Iterator[Result]:
    """Everything the table says of one architecture, as it grows."""
    start = time.process_time()
    try:
        specimen = build(architecture)
    except DoesNotBuild as error:
        yield {"builds": False, "reason": str(error)}
        return
    result: Result = {
        "builds": True,
        "class": type(specimen.model).__name__,
        "batch": {name: list(value.shape) for name, value in specimen.batch.items()},
        "build_seconds": time.process_time() - start,
        "own_loss": specimen.task != "",
    }
    result["blocks"] = _count_blocks(specimen)
    torch.manual_seed(0)
    expected = plain_step(copy.deepcopy(specimen.model), specimen.batch, 2)
    yield result
    for layout in LAYOUTS:
        found = compare(specimen, layout, expected)
        if not found["right"] and "differ" in found["error"]:
            found = _in_double(specimen, layout) or found
        result[layout.key] = found
        yield result


def _in_double(specimen: Specimen, layout: Layout) -> Result | None:
    """The comparison in fp64, if that removes the difference: it was rounding then."""
    model = copy.deepcopy(specimen.model).double()
    batch = {name: value.double() if value.is_floating_point() else value for name, value in specimen.batch.items()}
    double = Specimen(model, batch, specimen.task)
    try:
        expected = plain_step(copy.deepcopy(model), batch, 2)
    except Exception:
        return None
    found = compare(double, layout, expected)
    return found | {"double": True} if found["right"] else None


def _count_blocks(specimen: Specimen) -> int:
    model = copy.deepcopy(specimen.model)
    finest = Interceptor(model, finest_units(model))
    try:
        found = survey(model, 4, ((), specimen.batch), finest, device=torch.device("cpu"))
    except Exception:
        return 0  # the cut fails too, and says why
    return len(found.anatomy.blocks)


def _worker(pipe: Connection, architecture: Architecture, log: Path) -> None:
    torch.set_num_threads(1)
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_GIB << 30, MEMORY_GIB << 30))
    result: Result = {"builds": False}
    with log.open("a") as out:
        os.dup2(out.fileno(), 1)
        os.dup2(out.fileno(), 2)
        print(f"\n=== {architecture.name}", flush=True)
        try:
            for result in examine(architecture):
                pipe.send((False, result))
            pipe.send((True, result))
        except BaseException:
            pipe.send((True, _broken_off(result, traceback.format_exc()[-300:])))


def _broken_off(result: Result, reason: str) -> Result:
    """A result that did not get further: a model that builds is wrong wherever it was not compared."""
    if not result["builds"]:
        return {"builds": False, "reason": reason}
    missing = {layout.key: {"right": False, "error": reason} for layout in LAYOUTS}
    return missing | result


class Worker:
    """A forked process that examines one architecture, so that none depends on what those before it left behind."""

    def __init__(self, architecture: Architecture, log: Path):
        self.architecture = architecture
        self._since = time.monotonic()
        self._so_far: Result = {"builds": False}
        context = multiprocessing.get_context("fork")
        self.pipe, theirs = context.Pipe()
        self._process = context.Process(target=_worker, args=(theirs, architecture, log), daemon=True)
        self._process.start()
        theirs.close()

    def result(self) -> Result | None:
        """What came of the architecture; None while it is being examined."""
        done = False
        try:
            while not done and self.pipe.poll():
                done, self._so_far = self.pipe.recv()
        except EOFError:
            done, self._so_far = True, _broken_off(self._so_far, "the process died")
        if not done and time.monotonic() - self._since > TIME_LIMIT_S:
            done, self._so_far = True, _broken_off(self._so_far, f"takes more than {TIME_LIMIT_S:.0f} s")
        if not done:
            return None
        self._process.kill()
        self._process.join()
        self.pipe.close()
        return self._so_far


def sweep(todo: list[Architecture], folder: Path, jobs: int) -> None:
    """Examine architectures in processes of their own; one JSON file each."""
    workers: list[Worker] = []
    waiting = todo[::-1]
    done = 0
    while waiting or workers:
        while waiting and len(workers) < jobs:
            architecture = waiting.pop()
            workers.append(Worker(architecture, folder / "output.log"))
        wait([worker.pipe for worker in workers], timeout=1.0)
        for worker in list(workers):
            result = worker.result()
            if result is None:
                continue
            workers.remove(worker)
            done += 1
            _save(folder, worker.architecture, result)
            print(f"{done}/{len(todo)} {worker.architecture.name}: {_summary(result)}", flush=True)


def _save(folder: Path, architecture: Architecture, result: Result) -> None:
    (folder / f"{architecture.name}.json").write_text(json.dumps(result | {"name": architecture.name}, indent=1))


def _summary(result: Result) -> str:
    if not result["builds"]:
        return f"does not build: {result['reason'][:150]}"
    return " ".join(
        f"{layout} {'right' if result[layout.key]['right'] else result[layout.key]['error'][:150]};"
        for layout in LAYOUTS
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="architectures; all without")
    parser.add_argument("--cache", type=Path, default=Path("/tmp/hybridpp-models"), help="folder of the results")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--again", action="store_true", help="examine also what the folder holds")
    parser.add_argument("--page", type=Path, help="file of the table, written from all results of the folder")
    options = parser.parse_args()
    options.cache.mkdir(parents=True, exist_ok=True)
    everything = [a for a in architectures() if not options.names or a.name in options.names]
    known = {path.stem for path in options.cache.glob("*.json")}
    sweep([a for a in everything if options.again or a.name not in known], options.cache, options.jobs)
    if options.page:
        files = [options.cache / f"{architecture.name}.json" for architecture in architectures()]
        results = [json.loads(file.read_text()) for file in files if file.exists()]
        options.page.parent.mkdir(exist_ok=True)
        options.page.write_text(page(results))


if __name__ == "__main__":
    main()
