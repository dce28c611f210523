"""Share the layers of every architecture of transformers' registry and compare each gradient with one process."""

import copy
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from hybridpp_plugins import apply_tp
from models.comparing import Expected, examine, failure
from models.pool import Result, Study
from models.zoo import Buildable, Specimen, criterion_for
from support import boosted, gradients_of, sgd, whole_over_tp
from torch import Tensor

from hybridpp.cluster import Loopback
from hybridpp.partition import find_units
from hybridpp.sharding_plan import Plan

SIZES = (2, 4)
TOLERANCE = 1e-5
# The reason why blocks stay whole that a batch does not reach.
IDLE = "was not called"
_NUMBER = re.compile(r"(?<=\.)\d+(?=[.':]|$)")


@contextmanager
def _noted() -> Iterator[list[Plan]]:
    """Inside, the plans that were found."""
    plans: list[Plan] = []
    find = apply_tp.find_tp_plan

    def noting(*args: Any) -> Plan:
        plans.append(find(*args))
        return plans[-1]

    with mock.patch.object(apply_tp, "find_tp_plan", noting):
        yield plans


def divided_step(specimen: Specimen, tp_size: int, **settings: Any) -> tuple[float, dict[str, Tensor], float, Plan]:
    """Loss, gradients put together, the share of the blocks' parameters that a rank holds, and the plan."""

    def run() -> tuple[float, dict[str, Tensor], dict[str, float]]:
        model = copy.deepcopy(specimen.model)
        options = {"tp_size": tp_size, "num_microbatches": 2, **settings}
        booster, model, optimizer = boosted(model, sgd, specimen.batch, **options)
        criterion = criterion_for(specimen.batch)
        loss = booster.execute_pipeline(iter([specimen.batch]), model, criterion, optimizer)["loss"].item()
        held = {name: float(p.numel()) for name, p in model.named_parameters()}
        return loss, whole_over_tp(booster, model, gradients_of(booster, model)), held

    with _noted() as plans:
        ranks = Loopback(tp_size).run(run)
    loss, gradients, _ = ranks[0]
    blocks = [b for b in find_units(specimen.model, 1).blocks if plans[0].reasons.get(b) != IDLE]
    inside = tuple(f"{block}." for block in blocks)
    sizes = {name: p.numel() for name, p in specimen.model.named_parameters() if name.startswith(inside)}
    most = max(sum(held[name] for name in sizes) for *_, held in ranks)
    share = most / sum(sizes.values()) if sizes else 1.0
    return loss, gradients, share, plans[0]


def differences(specimen: Specimen, expected: Expected, loss: float, found: Any) -> list[Any]:
    """For the loss and every gradient: by how much it differs, in units of the tolerance, and the name."""
    whole_loss, whole = expected
    off = [(abs(loss - float(whole_loss)) / (TOLERANCE * max(abs(float(whole_loss)), 1e-1)), "loss")]
    for name, parameter in specimen.model.named_parameters():
        if not parameter.requires_grad or not parameter.numel():
            continue
        gradient = whole.get(name, torch.zeros_like(parameter))
        limit = TOLERANCE * max(float(gradient.abs().max()), 1e-1)
        error = (found[name] - gradient).abs().max() if name in found else torch.tensor(float("inf"))
        off.append((float(error) / limit if torch.isfinite(error) else float("inf"), name))
    return sorted(off, reverse=True)


def compare(specimen: Specimen, expected: Expected, tp_size: int, **settings: Any) -> Result:
    """What comes of sharing a model's layers, also with further settings of the plugin: right, or what is wrong."""
    start = time.process_time()
    try:
        loss, gradients, share, plan = divided_step(specimen, tp_size, **settings)
    except Exception as error:
        return failure(error)
    off = differences(specimen, expected, loss, gradients)
    wrong = [f"{name} by {TOLERANCE * units:.0e}" for units, name in off if not units <= 1]
    result: Result = {
        "right": not wrong,
        "off": TOLERANCE * off[0][0],
        "share": share,
        "seconds": time.process_time() - start,
        "whole": sorted({_NUMBER.sub("*", f"{name}: {why}") for name, why in plan.reasons.items() if why != IDLE}),
    }
    if wrong:
        result["error"] = f"{len(wrong)} of {len(off)} numbers differ: {'; '.join(wrong[:3])}"
    return result


def _about(specimen: Specimen) -> Result:
    return {}


def _examine(folder: Path, architecture: Buildable) -> Iterator[Result]:
    comparisons = {f"tp{size}": partial(compare, tp_size=size) for size in SIZES}
    return examine(folder, architecture, _about, comparisons)


def study(folder: Path) -> Study:
    """Of architectures whose layers are shared; ``folder`` keeps what was built."""
    return Study(partial(_examine, folder), tuple(f"tp{size}" for size in SIZES), 200)
