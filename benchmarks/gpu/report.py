"""Numbers of the benchmarks of this folder: one line of JSON each, behind a header that says what they are of."""

import json
import platform
import sys
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
import transformers


def header() -> dict[str, Any]:
    """Versions and devices of this host."""
    versions: dict[str, Any] = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
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
    """Print a line of JSON: what was measured, of what."""
    print(json.dumps({"benchmark": benchmark, "case": case, **numbers}), flush=True)
    sys.stdout.flush()
