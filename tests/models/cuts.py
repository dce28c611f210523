"""Cut every architecture of transformers' registry and compare each gradient with the whole model's."""

import copy
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import torch
from models.comparing import Expected, examine, failure
from models.pool import Result, Study
from models.table import LAYOUTS, Layout
from models.zoo import Buildable, Specimen, criterion_for
from support import boosted, gradients_of, sgd
from torch import Tensor

from hybridpp.cluster import Loopback
from hybridpp.module_adapter import AdapterLayer, ModuleAdapter
from hybridpp.partition.blocks import finest_units
from hybridpp.partition.intercept import Interceptor
from hybridpp.partition.traced_units import find_traced_units


def staged_step(specimen: Specimen, layout: Layout) -> tuple[float, dict[str, Tensor], list[tuple[int, int]]]:
    """Loss, gradients, and of each rank but the first the number of values that reach it and their bytes per sample."""
    samples = len(next(iter(specimen.batch.values()))) // 2
    microbatch = {name: value[:samples] for name, value in specimen.batch.items()}
    chunks = {"schedule": "gpipe", "num_model_chunks": layout.num_chunks} if layout.num_chunks > 1 else {}

    def run() -> tuple[float, dict[str, Tensor], tuple[int, int]]:
        model = copy.deepcopy(specimen.model)
        options = {"pp_size": layout.pp_size, "num_microbatches": 2, **chunks}
        booster, model, optimizer = boosted(model, sgd, microbatch, **options)
        criterion = criterion_for(specimen.batch)
        loss = booster.execute_pipeline(iter([specimen.batch]), model, criterion, optimizer)["loss"].item()
        staged = booster.plugin._engine(model).staged
        plans = staged.plans((), microbatch)
        specs = [spec for plan in plans.values() for spec in plan.incoming_specs]
        size = sum(torch.Size(spec.shape).numel() * spec.dtype.itemsize for spec in specs) // samples
        return loss, gradients_of(booster, model), (len(specs), size)

    ranks = Loopback(layout.pp_size).run(run)
    gradients: dict[str, Tensor] = {}
    for _, owned, _ in ranks:
        gradients.update(owned)
    return ranks[-1][0], gradients, [crossing for *_, crossing in ranks[1:]]


def compare(specimen: Specimen, expected: Expected, layout: Layout) -> Result:
    """What comes of cutting a model so: right, or what is wrong."""
    start = time.process_time()
    try:
        loss, gradients, crossing = staged_step(specimen, layout)
    except Exception as error:
        return failure(error)
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


def about(specimen: Specimen) -> Result:
    """What a table says of a model that is cut, beside what came of it."""
    return {
        "batch": {name: list(value.shape) for name, value in specimen.batch.items()},
        "own_loss": specimen.task != "",
        "blocks": _count_blocks(specimen),
    }


def _examine(folder: Path, architecture: Buildable) -> Iterator[Result]:
    comparisons = {layout.key: partial(compare, layout=layout) for layout in LAYOUTS}
    return examine(folder, architecture, about, comparisons)


def _count_blocks(specimen: Specimen) -> int:
    model = copy.deepcopy(specimen.model)
    finest = Interceptor(ModuleAdapter(model), AdapterLayer.UNIT_RNG, finest_units(model))
    try:
        found = find_traced_units(ModuleAdapter(model), 4, ((), specimen.batch), finest, device=torch.device("cpu"))
    except Exception:
        return 0  # the cut fails too, and says why
    return len(found.units.blocks)


def study(folder: Path) -> Study:
    """Of architectures that are cut; ``folder`` keeps what was built."""
    return Study(partial(_examine, folder), tuple(layout.key for layout in LAYOUTS), 400)
