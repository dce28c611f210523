"""The stages of a cut, as a table."""

from collections.abc import Mapping, Sequence

from hybridpp.nn.name_ranges import name_ranges
from hybridpp.partition import StageSummary, shared_parameters
from hybridpp.text_table import TextTable

_TITLES = ("stage", "modules", "parameters", "GFLOPs", "KiB sent", "% parameters", "% FLOPs")
_OF_STAGES, _OF_RANKS = ("MiB to train",), ("parameters per rank", "MiB per rank to train")


def render_cut(
    stages: Sequence[StageSummary],
    num_parameters: int,
    batch_size: int,
    shares: Mapping[str, int] | None = None,
) -> list[str | TextTable]:
    """A line per stage, a line of totals, and the parameters that several stages hold.

    Args:
        stages: of the cut.
        num_parameters: of the model; parameters that several stages hold count once.
        batch_size: of the sample; FLOPs and sent bytes are given per sample.
        shares: elements of a rank's share of each parameter, by name, under tensor parallelism.
    """
    flops, held = sum(summary.flops for summary in stages), sum(summary.num_parameters for summary in stages)
    titles = _TITLES + (_OF_RANKS if shares else _OF_STAGES)
    rows: list[tuple[str, ...]] = [
        (
            str(summary.stage),
            ", ".join(name_ranges(summary.calls)),
            f"{summary.num_parameters:,}",
            f"{summary.flops / batch_size / 1e9:,.2f}",
            f"{summary.sent_bytes / batch_size / 1024:,.1f}" if summary.stage < len(stages) - 1 else "-",
            _percent(summary.num_parameters, held),
            _percent(summary.flops, flops),
            *((f"{sum(shares[name] for name in summary.parameters):,}",) if shares else ()),
            f"{summary.state_bytes / 2**20:,.1f}",
        )
        for summary in stages
    ]
    sent = sum(summary.sent_bytes for summary in stages)
    totals = (
        "total",
        "",
        f"{num_parameters:,}",
        f"{flops / batch_size / 1e9:,.2f}",
        f"{sent / batch_size / 1024:,.1f}",
        "",
        "",
        *(("",) if shares else ()),
        f"{sum(summary.state_bytes for summary in stages) / 2**20:,.1f}",
    )
    return [TextTable(titles, rows, totals, left=(1,)), *_shared(stages)]


def _percent(part: int, total: int) -> str:
    return f"{100 * part / total:.1f}" if total else "-"


def _shared(stages: Sequence[StageSummary]) -> list[str]:
    shared = shared_parameters(stages)
    if not shared:
        return []
    lines = [
        f"  {name} ({stages[at[0]].parameters[name]:,}): stages {', '.join(map(str, at))}"
        for name, at in shared.items()
    ]
    return ["", "held by several stages, which sum their gradients:", *lines]
