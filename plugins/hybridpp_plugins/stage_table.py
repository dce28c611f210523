"""The stages of a boosted model, as a table of text."""

from hybridpp.nn.name_ranges import name_ranges
from hybridpp.text_table import text_table
from hybridpp_plugins.engine import Engine

_TITLES = ("stage", "rank of the pipeline", "modules", "parameters")


def stage_table(engine: Engine) -> str:
    """A line for each stage of the model, a line of totals, and the parameters that several stages hold.

    It is the same on every rank, and nothing is communicated. Parameters are counted as before boost, so they are those
    of all ranks that share the layers.
    """
    staged, sizes, placement = engine.staged, engine.original.sizes, engine.planner.placement
    callers, owners = staged.unit_stages, staged.owners
    rows = [
        (
            str(stage),
            str(placement[stage]),
            ", ".join(name_ranges([unit for unit, stages in callers.items() if stage in stages])),
            f"{sum(sizes[name] for name, stages in owners.items() if stage in stages):,}",
        )
        for stage in range(staged.num_stages)
    ]
    totals = ("total", "", "", f"{sum(sizes[name] for name in owners):,}")
    table = text_table(_TITLES, rows, totals, left=(2,))
    shared = [f"  {name}: stages {', '.join(map(str, at))}" for name, at in owners.items() if len(at) > 1]
    lines = ["", "held by several stages, which sum their gradients:", *shared] if shared else []
    return "\n".join([f"{type(engine.model).__name__}, stages: {staged.num_stages}", "", table, *lines])
