"""The memory of a rank in training, as a table."""

from collections.abc import Mapping, Sequence

from hybridpp.config import ZeroConfig
from hybridpp.partition import StageSummary, StateBytes
from hybridpp.text_table import TextTable


def render_memory(
    stages: Sequence[StageSummary],
    state_bytes: Mapping[str, StateBytes],
    num_replicas: int,
    zero: ZeroConfig,
    host_bytes: Mapping[str, int] | None = None,
) -> list[str | TextTable]:
    """A line per stage with the MiB that each of its ranks holds, trained with Adam.

    Args:
        stages: of the cut.
        state_bytes: of each parameter on a rank that holds it, by name.
        num_replicas: of the model.
        zero: what they divide among themselves.
        host_bytes: what of each parameter lies in host memory, beside that; None: nothing does.
    """
    titles = ("stage", *StateBytes._fields, "total", *(() if host_bytes is None else ("host memory",)))
    rows = []
    for summary in stages:
        held = [state_bytes[name] for name in summary.parameters]
        sums = [sum(column) for column in zip(*held, strict=True)] or [0] * len(StateBytes._fields)
        on_host = [] if host_bytes is None else [sum(host_bytes[name] for name in summary.parameters)]
        rows.append((str(summary.stage), *(f"{number / 2**20:,.1f}" for number in (*sums, sum(sums), *on_host))))
    replicas = f"{num_replicas} replica{'s' if num_replicas > 1 else ''}"
    divided = f"zero_stage={zero.zero_stage}" + (f", zero_size={zero.zero_size}" if zero.zero_size else "")
    return [f"MiB of each rank in training with Adam, {replicas}, {divided}", "", TextTable(titles, rows)]
