"""Infer a tensor-parallel plan for every registered architecture and compare the divided model's gradients."""

import argparse
import copy
import json
import multiprocessing
import os
import resource
import time
import traceback
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
from models.zoo import Architecture, DoesNotBuild, Specimen, architectures, build, criterion
from torch import Tensor, nn

from hybridpp.cluster import Loopback, current_world
from hybridpp.partition.blocks import dissect
from hybridpp.tensor_parallel.infer import Inference, infer_plan
from hybridpp.tensor_parallel.infer_block import SampleCall
from hybridpp.tensor_parallel.infer_division import divide

TIME_LIMIT_S, MEMORY_GIB = 300.0, 10

Result = dict[str, Any]


def sample_calls(model: nn.Module, specimen: Specimen, blocks: tuple[str, ...]) -> dict[str, SampleCall]:
    """What each block was called with first."""
    calls: dict[str, SampleCall] = {}

    def keep(name: str) -> Any:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            calls.setdefault(name, (args, kwargs))

        return hook

    handles = [model.get_submodule(n).register_forward_pre_hook(keep(n), with_kwargs=True) for n in blocks]
    model(**{name: value.clone() for name, value in specimen.batch.items()})
    for handle in handles:
        handle.remove()
    model.zero_grad()
    return calls


def infer(specimen: Specimen, tp_size: int, *, styles_only: bool = False) -> tuple[tuple[str, ...], Inference]:
    """The blocks of a model and the plan for them; the model has run once then, as in a trace."""
    model = specimen.model
    blocks = dissect(model, 1).blocks
    return blocks, infer_plan(model, blocks, sample_calls(model, specimen, blocks), tp_size, styles_only=styles_only)


def step(model: nn.Module, batch: dict[str, Tensor]) -> tuple[float, dict[str, Tensor]]:
    """Loss and gradients; zeros where there is none."""
    inputs = {name: value.clone() for name, value in batch.items()}
    loss = criterion(model(**inputs), inputs)
    loss.backward()
    gradients = {
        name: torch.zeros_like(p) if p.grad is None else p.grad
        for name, p in model.named_parameters()
        if p.requires_grad
    }
    return loss.item(), gradients


def compare(specimen: Specimen, found: Inference, tp_size: int, double: bool = False) -> list[str]:
    """What is wrong with the divided model's loss and gradients."""
    model, batch = copy.deepcopy(specimen.model), specimen.batch
    if double:
        model = model.double()
        batch = {name: value.double() if value.is_floating_point() else value for name, value in batch.items()}
    loss, whole = step(copy.deepcopy(model), batch)

    def run() -> tuple[float, dict[str, Tensor]]:
        group = current_world().split([range(tp_size)])
        assert group is not None
        return step(divide(model, found.division, group), batch)

    ranks = Loopback(tp_size).run(run)
    wrong = [f"loss {own} instead of {loss}" for own, _ in ranks if abs(own - loss) > 1e-6 + 1e-5 * abs(loss)]
    scale = max((float(gradient.abs().max()) for gradient in whole.values() if gradient.numel()), default=0.0)
    for name, gradient in whole.items():
        parts = [gradients[name] for _, gradients in ranks]
        if name in found.division.parts:
            together = torch.zeros_like(gradient)
            part = found.division.parts[name]
            for rank, own in enumerate(parts):
                together.index_add_(part.dim, part.index(rank, tp_size, gradient.shape[part.dim]), own)
            parts = [together]
        elif name in found.division.first_only:
            parts = parts[:1]
        elif name in found.summed:
            parts = [torch.stack(parts).sum(0)]
        for own in parts:
            limit = 1e-6 + 1e-5 * float(gradient.abs().max()) + 1e-6 * scale if gradient.numel() else 0.0
            if own.shape != gradient.shape or (gradient.numel() and not (own - gradient).abs().max() <= limit):
                off = (own - gradient).abs().max() if own.shape == gradient.shape else "the shape"
                wrong.append(f"{name} differs by {off} of {gradient.abs().max()}")
                break
    return wrong


def share(specimen: Specimen, blocks: tuple[str, ...], found: Inference, tp_size: int) -> float:
    """How much of the blocks' weights one rank has; blocks that the batch does not reach do not count."""
    blocks = tuple(block for block in blocks if found.plan.reasons.get(block) != "was not called")
    held = {
        name: parameter.numel()
        for name, parameter in specimen.model.named_parameters()
        if name.startswith(tuple(f"{block}." for block in blocks))
    }
    own = 0.0
    for name, size in held.items():
        part = found.division.parts.get(name)
        length = specimen.model.get_parameter(name).shape[part.dim] if part else 1
        own += size if part is None else size * len(part.index(0, tp_size, length)) / length
    return own / max(sum(held.values()), 1)


def examine(architecture: Architecture, tp_size: int) -> Result:
    """Everything that is found of one architecture."""
    start = time.process_time()
    try:
        specimen = build(architecture)
    except DoesNotBuild as error:
        return {"builds": False, "reason": str(error)}
    built = time.process_time()
    blocks, found = infer(specimen, tp_size)
    inferred = time.process_time()
    result: Result = {
        "builds": True,
        "class": type(specimen.model).__name__,
        "seconds": {"build": built - start, "infer": inferred - built},
        "share": share(specimen, blocks, found, tp_size),
        "styles": found.plan.styles,
        "attributes": found.plan.attributes,
        "reasons": found.plan.reasons,
        "arguments": {str(place): str(part) for place, part in found.division.arguments.items()},
        "spreads": sorted(found.division.spreads),
        "summed": sorted(found.summed),
        "own_plan": list(found.differences),
    }
    try:
        wrong = compare(specimen, found, tp_size)
        if wrong:
            double = compare(specimen, found, tp_size, double=True)
            wrong, result["double"] = (wrong, False) if double else ([], True)
    except Exception:
        wrong = [traceback.format_exc()[-600:]]
    return result | {"right": not wrong, "wrong": wrong[:4]}


def _worker(pipe: Connection, architecture: Architecture, tp_size: int, log: Path) -> None:
    torch.set_num_threads(1)
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_GIB << 30, MEMORY_GIB << 30))
    with log.open("a") as out:
        os.dup2(out.fileno(), 1)
        os.dup2(out.fileno(), 2)
        try:
            pipe.send(examine(architecture, tp_size))
        except BaseException:
            pipe.send({"builds": True, "right": False, "share": 1.0, "wrong": [traceback.format_exc()[-600:]]})


def sweep(todo: list[Architecture], folder: Path, jobs: int, tp_size: int) -> None:
    """Examine architectures in processes of their own; one JSON file each."""
    context = multiprocessing.get_context("fork")
    running: dict[Any, tuple[Architecture, Any, float]] = {}
    waiting = todo[::-1]
    while waiting or running:
        while waiting and len(running) < jobs:
            architecture = waiting.pop()
            pipe, theirs = context.Pipe()
            process = context.Process(
                target=_worker, args=(theirs, architecture, tp_size, folder / "output.log"), daemon=True
            )
            process.start()
            theirs.close()
            running[pipe] = (architecture, process, time.monotonic())
        ready = wait(list(running), timeout=1.0)
        for pipe, (architecture, process, since) in list(running.items()):
            result: Result = {"builds": True, "right": False, "share": 1.0, "wrong": ["the process died"]}
            if pipe in ready:
                with suppress(EOFError):
                    result = pipe.recv()
            elif time.monotonic() - since > TIME_LIMIT_S:
                result["wrong"] = [f"takes more than {TIME_LIMIT_S:.0f} s"]
            else:
                continue
            process.kill()
            process.join()
            pipe.close()
            del running[pipe]
            (folder / f"{architecture.name}.json").write_text(
                json.dumps(result | {"name": architecture.name}, indent=1)
            )
            print(f"{architecture.name}: {_line(result)}", flush=True)


def _line(result: Result) -> str:
    if not result["builds"]:
        return f"does not build: {result['reason'][:100]}"
    verdict = "right" if result["right"] else f"WRONG: {' '.join(result['wrong'])[-300:]!r}"
    return f"share {result['share']:.2f}, {verdict}"


def summary(results: list[Result]) -> str:
    """Numbers over all results."""
    built = [result for result in results if result["builds"]]
    right = [result for result in built if result["right"]]
    lines = [f"{len(built)} build, {len(right)} right ({100 * len(right) / max(len(built), 1):.1f} %)"]
    for limit in (0.55, 0.7, 0.9, 0.999):
        number = sum(result["share"] <= limit for result in right)
        lines.append(f"block weights per rank <= {limit}: {number} ({100 * number / max(len(built), 1):.1f} %)")
    lines += [f"  wrong {r['name']}: {' '.join(r['wrong'])[-200:]!r}" for r in built if not r["right"]]
    lines += [f"  share {r['share']:.2f} {r['name']}: {_why(r)}" for r in right if r["share"] > 0.7]
    return "\n".join(lines)


def _why(result: Result) -> str:
    return "; ".join(f"{name}: {reason}" for name, reason in list(result.get("reasons", {}).items())[:2])[:200]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="architectures; all without")
    parser.add_argument("--cache", type=Path, default=Path("/tmp/hybridpp-tp-plans"), help="folder of the results")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--tp-size", type=int, default=2)
    parser.add_argument("--every", type=int, default=1, help="take every so many architectures")
    parser.add_argument("--again", action="store_true", help="examine also what the folder holds")
    options = parser.parse_args()
    options.cache.mkdir(parents=True, exist_ok=True)
    chosen = [a for a in architectures() if not options.names or a.name in options.names][:: options.every]
    known = {path.stem for path in options.cache.glob("*.json")}
    sweep([a for a in chosen if options.again or a.name not in known], options.cache, options.jobs, options.tp_size)
    files = [options.cache / f"{architecture.name}.json" for architecture in chosen]
    print(summary([json.loads(file.read_text()) for file in files if file.exists()]))


if __name__ == "__main__":
    main()
