"""The page that says which models' layers are shared right."""

from datetime import UTC, datetime

import torch
import transformers
from models.divided import SIZES
from models.pool import Result
from models.table import cell, share

HEADING = "# Which models' layers are sharded right"
AIM = 0.7
# Of a process that dies no more is known than what was found out by hand.
_EXPLAINED = {
    "nystromformer": "plain PyTorch dies, too, in the backward pass of a convolution of one channel with a kernel of "
    "65 on 16 places, which is what a rank has of this tiny model at tp=4",
}
# Of the share that a rank holds, to be counted.
LIMITS = {2: (0.55, AIM, 0.95), 4: (0.3, 0.55, AIM, 0.95)}


def part(results: list[Result]) -> str:
    """Of docs/models.md, what is said of ranks that share layers."""
    built = sorted((result for result in results if result["builds"]), key=lambda result: result["name"])
    rows = "\n".join(_row(result) for result in built)
    return f"""{HEADING}

Written by `make models-tp` on {datetime.now(UTC):%Y-%m-%d}, with torch {torch.__version__} and transformers \
{transformers.__version__}.

The same tiny models, boosted with `HybridParallelPlugin(tp_size=2, pp_size=1)` and no
further setting: the library searches for the plan. An architecture is *right* if the loss and **every** parameter's
gradient, gathered from the ranks' shards, agree with plain PyTorch in one process to 1e-5 of the largest number in it
(or of 0.1, if that is larger). The ranks are threads of one process.

{_totals(built)}
{_failures(built)}
## Sharded layers by architecture

Share: the fraction of the parameters in the used blocks that a rank holds. Off: the largest relative difference of a
gradient at tp=2. f64: in fp32 rounding exceeds the limit; in fp64 nothing differs. tp=4: most of these models have 4
heads.

| architecture | class | tp=2 | share | off | tp=4 | share | what stays replicated at tp=2 |
|---|---|---|--:|--:|---|--:|---|
{rows}
"""


def _totals(built: list[Result]) -> str:
    lines = ["| | number | share |", "|---|--:|--:|", f"| architectures that build | {len(built)} | |"]
    for size in SIZES:
        found = [result[f"tp{size}"] for result in built if f"tp{size}" in result]
        right = [one for one in found if one["right"]]
        lines.append(f"| compared at tp={size} | {len(found)} | {share(len(found), len(built))} |")
        lines.append(f"| of those, right | {len(right)} | {share(len(right), len(found))} |")
        for limit in LIMITS[size]:
            number = sum(one["share"] <= limit for one in right)
            held = f"at most {limit} of the blocks' parameters on a rank"
            lines.append(f"| of those, right and {held} | {number} | {share(number, len(found))} |")
    return "\n".join(lines) + "\n"


def _failures(built: list[Result]) -> str:
    failed = [
        (result["name"], size, "; ".join(_reasons(result, size)))
        for result in built
        for size in SIZES
        if not result.get(f"tp{size}", {"right": True})["right"]
    ]
    if not failed:
        return ""
    rows = "\n".join(f"| {name} | {size} | {cell(error, 400)} |" for name, size, error in failed)
    return f"""## What fails when layers are sharded

| architecture | tp | error |
|---|--:|---|
{rows}
"""


def _reasons(result: Result, size: int) -> list[str]:
    error = result[f"tp{size}"]["error"]
    explained = _EXPLAINED.get(result["name"]) if error == "the process died" else None
    return [error, explained] if explained else [error]


def _row(result: Result) -> str:
    two, four = result["tp2"], result.get("tp4", {})
    cells = [result["name"], result["class"], _verdict(two), _share(two), _off(two), _verdict(four), _share(four)]
    return f"| {' | '.join(cells)} | {cell('; '.join(two.get('whole', [])), 160)} |"


def _verdict(found: Result) -> str:
    if not found:
        return ""
    if not found["right"]:
        return "**no**"
    return "right, f64" if found.get("double") else "right"


def _share(found: Result) -> str:
    return f"{found['share']:.2f}" if "share" in found else ""


def _off(found: Result) -> str:
    return f"{found['off']:.0e}" if "off" in found else ""
