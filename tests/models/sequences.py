"""Run the blocks of every architecture of transformers' registry on shards of sequences, and say of which it went."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import transformers
from hybridpp_plugins import apply_sp, apply_tp
from models import divided
from models.comparing import Expected, examine
from models.pool import Result, Study
from models.table import cell, share
from models.zoo import Buildable, Specimen, architectures

from hybridpp.plan_search import SequencePlan

KEY = "sp2"
HEADING = "# Which models' blocks run on shards of sequences"
_NUMBER = re.compile(r"(?<=\.)\d+(?=[.':]|$)")
_NO_BLOCK = "can run on sequence shards"


@contextmanager
def _noted() -> Iterator[list[SequencePlan]]:
    """Inside, what was found; ranks of one process look for the same only once."""
    found: list[SequencePlan] = []
    infer = apply_sp.infer_sequence

    def once(*args: Any) -> SequencePlan:
        if not found:
            found.append(infer(*args))
        return found[0]

    with mock.patch.object(apply_sp, "infer_sequence", once):
        yield found


def compare(specimen: Specimen, expected: Expected) -> Result:
    """What comes of sequence parallelism at tp_size=2: right, or what is wrong; and which blocks it reaches."""
    assert apply_tp.sequence_plan is apply_sp.sequence_plan, "what boost calls is looked at"
    with _noted() as found:
        result = divided.compare(specimen, expected, 2, enable_sequence_parallelism=True)
    plan = found[0] if found else SequencePlan()
    called = {name: why for name, why in plan.reasons.items() if why != divided.IDLE}
    why = sorted({_NUMBER.sub("*", f"{name}: {reason}") for name, reason in called.items()})
    told: Result = {"blocks": len(plan.blocks), "others": len(called), "why": why}
    if not plan.blocks and _NO_BLOCK in result.get("error", ""):
        return told | {"right": True, "refused": True}
    return told | result


def _about(specimen: Specimen) -> Result:
    return {}


def _examine(folder: Path, architecture: Buildable) -> Iterator[Result]:
    return examine(folder, architecture, _about, {KEY: compare})


def study(folder: Path) -> Study:
    """Of architectures whose sequences are divided; ``folder`` keeps what was built."""
    return Study(partial(_examine, folder), (KEY,), 200)


def part(results: list[Result]) -> str:
    """Of docs/models.md, what is said of sequence parallelism."""
    built = sorted((result for result in results if result["builds"]), key=lambda result: result["name"])
    found = [result[KEY] for result in built]
    right = [one for one in found if one["right"] and one.get("blocks")]
    some, every = len(right), sum(not one["others"] for one in right)
    reached = [one for one in found if one.get("blocks") or not one["right"]]
    rows = "\n".join(_row(result["name"], result["class"], result[KEY]) for result in built)
    return f"""{HEADING}

Written by `make models-sp` on {datetime.now(UTC):%Y-%m-%d}, with torch {torch.__version__} and transformers \
{transformers.__version__}.

The same tiny models with `HybridParallelPlugin(tp_size=2, pp_size=1, enable_sequence_parallelism=True)` and no
further setting, compared as above. Where no block can run on shards of sequences, boost refuses it with the reason.
Examined: {len(results)} of the registry's {len(architectures())}.

| | number | share |
|---|--:|--:|
| architectures that build | {len(built)} | |
| some blocks run on shards | {len(reached)} | {share(len(reached), len(built))} |
| of those, right | {some} | {share(some, len(reached))} |
| of those, every block that runs | {every} | {share(every, len(reached))} |
| refused at boost | {len(built) - len(reached)} | {share(len(built) - len(reached), len(built))} |

| architecture | class | tp=2 | blocks on shards | others | off | why blocks keep complete sequences |
|---|---|---|--:|--:|--:|---|
{rows}
"""


def _row(name: str, kind: str, one: Result) -> str:
    verdict = "refused" if one.get("refused") else "right" if one["right"] else "**no**"
    why = "; ".join(one.get("why", ())) if one["right"] else one["error"]
    off = f"{one['off']:.0e}" if "off" in one else ""
    cells = [name, kind, verdict, str(one.get("blocks", "")), str(one.get("others", "")), off, cell(why, 160)]
    return f"| {' | '.join(cells)} |"
