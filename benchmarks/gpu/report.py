"""Numbers of the benchmarks of this folder: lines of JSON with versions and device, and tables of them."""

import json
import platform
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
import transformers

from hybridpp.text_table import text_table


@cache
def host() -> dict[str, Any]:
    """What numbers are of: versions, and the first device."""
    is_cuda = torch.cuda.is_available()
    return {
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "device": torch.cuda.get_device_name(0) if is_cuda else f"cpu, {platform.machine()}",
    }


def header() -> dict[str, Any]:
    """More versions, and all devices of this host."""
    versions: dict[str, Any] = {
        "python": platform.python_version(),
        "cuda": torch.version.cuda,
        "nccl": ".".join(map(str, torch.cuda.nccl.version())) if dist.is_nccl_available() else None,
        "devices": [],
    }
    if torch.cuda.is_available():
        for number in range(torch.cuda.device_count()):
            properties = torch.cuda.get_device_properties(number)
            versions["devices"].append(f"{properties.name}, {properties.total_memory / 2**30:.0f} GiB")
    return versions


def tell(benchmark: str, case: str, numbers: Mapping[str, Any]) -> None:
    """Print a line of JSON: what was measured, of what, and where."""
    print(json.dumps({"benchmark": benchmark, "case": case, **numbers, **host()}), flush=True)


def lines_of(output: str) -> list[dict[str, Any]]:
    """The lines of :func:`tell` in what a script printed."""
    return [json.loads(line) for line in output.splitlines() if line.startswith('{"benchmark": ')]


def table(lines: Sequence[Mapping[str, Any]]) -> str:
    """A row per line: the case and its numbers; long texts are left to the lines."""
    about = {"benchmark", "said", *host()}
    rows = [{name: value for name, value in line.items() if name not in about} for line in lines]
    titles = list({name: None for row in rows for name in row})
    cells = [[_cell(row.get(title)) for title in titles] for row in rows]
    return text_table(titles, cells) if rows else ""


def _cell(value: Any) -> str:
    if isinstance(value, list):
        return " ".join(map(_cell, value))
    return "" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)
