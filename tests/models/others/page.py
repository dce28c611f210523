"""The page that says which models of other libraries are cut and shared right."""

from collections.abc import Iterator
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version

import torch
from models.others.recipe import MAX_MIB
from models.others.study import CUTS, KEYS, SHARED
from models.others.zoo import everything
from models.pool import Result
from models.table import cell, share

HEADING = "# Which models of other libraries are cut and sharded right"
_LABELS = {key: str(layout) for layout in CUTS for key in [layout.key]} | {f"tp{SHARED}": f"tp={SHARED}"}
_PACKAGES = ("diffusers", "timm", "monai", "x-transformers", "peft", "torchvision")


def part(results: list[Result]) -> str:
    """Of docs/models.md, what is said of other libraries' models."""
    results = sorted(results, key=lambda result: result["name"].lower())
    built = [result for result in results if result["builds"]]
    rows = "\n".join(_row(result) for result in built)
    reasons = "\n".join(f"| {r['name']} | {cell(r['reason'], 160)} |" for r in results if not r["builds"])
    return f"""{HEADING}

Written by `make models-others` on {datetime.now(UTC):%Y-%m-%d}, with {", ".join(_versions())}.

Models that no Hugging Face configuration describes. Each library has one rule in `tests/models/others/` that makes tiny
models of it by the names of its constructors' parameters, and batches by those of its forwards'; of timm, one model of
each family. Dropout is off, and parameters that are initialized to zero have small numbers instead. A model *builds* if
a step in plain PyTorch gives a finite loss and gradients, the same ones twice. It is *right* if the loss and **every**
parameter's gradient (2 micro-batches, fp32; normalisation over the same micro-batches) agree with that step, as in the
tables above. Ranks are threads of one process. Examined: {len(results)} of {sum(1 for _ in everything())}.

{_totals(results, built)}
{_failures(built)}
## Models of other libraries

Blocks: modules after which the model may be cut, for 4 stages. Share: the fraction of the parameters in the used
blocks that a rank holds at tp={SHARED}. s: CPU seconds for all. f64: in fp32 rounding exceeds the limit; in fp64
nothing differs.

| model | class | parameters | blocks | s | {" | ".join(_LABELS.values())} | share |
|---|---|--:|--:|--:|{"---|" * len(KEYS)}--:|
{rows}

## What does not build of other libraries

This says nothing about hybridpp: these models are random by design, larger than
{MAX_MIB} MiB, or not covered by the rules here.

| model | reasons |
|---|---|
{reasons}
"""


def _versions() -> Iterator[str]:
    yield f"torch {torch.__version__}"
    for package in _PACKAGES:
        try:
            yield f"{package} {version(package)}"
        except PackageNotFoundError:
            continue


def _library(result: Result) -> str:
    library: str = result["name"].partition(".")[0]
    return library


def _totals(results: list[Result], built: list[Result]) -> str:
    header = ["library", "models", "build", *(f"right at {label}" for label in _LABELS.values())]
    lines = [f"| {' | '.join(header)} |", "|---|" + "--:|" * (len(header) - 1)]
    libraries = sorted({_library(result) for result in results})
    for library in [*libraries, None]:
        mine = [result for result in built if library in (None, _library(result))]
        number = sum(library in (None, _library(result)) for result in results)
        right = [sum(result[key]["right"] for result in mine) for key in KEYS]
        cells = [library or "all", str(number), str(len(mine)), *(f"{n} ({share(n, len(mine))})" for n in right)]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _failures(built: list[Result]) -> str:
    failed = [(r["name"], _LABELS[key], r[key]["error"]) for r in built for key in KEYS if not r[key]["right"]]
    if not failed:
        return ""
    rows = "\n".join(f"| {name} | {label} | {cell(error, 400)} |" for name, label, error in failed)
    return f"""## What fails of other libraries, and what the user is told

| model | layout | error |
|---|---|---|
{rows}
"""


def _row(result: Result) -> str:
    seconds = sum(result[key].get("seconds", 0.0) for key in KEYS)
    held = result[f"tp{SHARED}"].get("share")
    cells = [
        result["name"],
        result["class"],
        f"{result['parameters']:,}",
        str(result["blocks"]),
        f"{seconds:.1f}",
        *(_verdict(result[key]) for key in KEYS),
        f"{held:.2f}" if held is not None else "",
    ]
    return f"| {' | '.join(cells)} |"


def _verdict(found: Result) -> str:
    if not found["right"]:
        return "**no**"
    return "right, f64" if found.get("double") else "right"
