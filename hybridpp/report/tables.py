"""The tables of a report."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from statistics import fmean, median

from hybridpp.report.prediction import Prediction
from hybridpp.report.recording import Recording
from hybridpp.report.records import HELD
from hybridpp.report.steps import USES, RankUse, Step, readings
from hybridpp.sizes import format_bytes
from hybridpp.text_table import TextTable
from hybridpp.timeline import COMPUTE_KINDS

_NONE = "-"


def use_table(uses: Sequence[RankUse], step: Step) -> TextTable:
    """Milliseconds of each rank in a step by what they went to; columns of zeros are left out."""
    names = [name for name in USES if any(use.ms[name] >= 0.0005 for use in uses)]
    rows = [
        (
            f"{use.rank.rank}",
            *(f"{use.ms[name]:,.2f}" for name in names),
            f"{100 * (1 - use.computing_ms / (step.duration_ms or 1)):.1f} %",
        )
        for use in uses
    ]
    return TextTable(("rank", *(USES[name] for name in names), "not computing"), rows)


def memory_table(recording: Recording, step: Step) -> TextTable | None:
    """What each rank had in use in a step; None: nothing was read."""
    rows: list[tuple[str, ...]] = []
    for rank in recording.ranks:
        if not (read := readings(rank, step.number)):
            continue
        most = max((one for one in rank.actions if one.step == step.number), key=lambda one: one.memory or 0)
        microbatch = "" if most.microbatch is None else most.microbatch
        peak = _NONE if rank.peak_bytes is None else format_bytes(rank.peak_bytes)
        sizes = (format_bytes(max(read)), format_bytes(max(read) - min(read)))
        rows.append((f"{rank.rank}", *sizes, f"{most.stage}{most.kind}{microbatch}", peak))
    titles: tuple[str, ...] = ("rank", "most after an action", "above the least", "after", "peak of the process")
    if all(rank.peak_bytes is None for rank in recording.ranks):
        titles, rows = titles[:-1], [row[:-1] for row in rows]
    return TextTable(titles, rows) if rows else None


def held_table(recording: Recording) -> TextTable | None:
    """What each rank holds from step to step; None: it was not recorded."""
    if not any(rank.held for rank in recording.ranks):
        return None
    names = [name for name in HELD if any(rank.held.get(name) for rank in recording.ranks)]
    rows = []
    for rank in recording.ranks:
        stages = [stage for stage, position in enumerate(recording.placement) if position == rank.pp]
        total = sum(size for name, size in rank.held.items() if name != "host")
        sizes = (format_bytes(rank.held.get(name, 0)) for name in names)
        rows.append((f"{rank.rank}", ", ".join(map(str, stages)), *sizes, format_bytes(total)))
    titles = ("in host memory" if name == "host" else name for name in names)
    return TextTable(("rank", "stages", *titles, "total"), rows)


def stage_table(recording: Recording, step: Step) -> TextTable:
    """What each stage of the model is: its modules, its times, what a micro-batch leaves held and what it sends."""
    facts = [_of_stage(recording, step, number) for number in range(len(recording.stages))]
    kinds = [kind for kind in COMPUTE_KINDS if any(times[kind] for times, _, _ in facts)]
    rows = [
        (
            f"{number}",
            ", ".join(str(rank.rank) for rank in recording.ranks if rank.pp == stage.position),
            stage.modules,
            f"{stage.parameters:,}",
            *(f"{fmean(times[kind]):,.2f}" if times[kind] else _NONE for kind in kinds),
            format_bytes(median(grown)) if grown and median(grown) > 0 else _NONE,
            format_bytes(fmean(sent)) if sent else _NONE,
        )
        for number, (stage, (times, grown, sent)) in enumerate(zip(recording.stages, facts, strict=True))
    ]
    titles = ("stage", "ranks", "modules", "parameters", *(f"{kind} ms" for kind in kinds), "held after F", "message")
    return TextTable(titles, rows, left=(1, 2))


def _of_stage(recording: Recording, step: Step, stage: int) -> tuple[Mapping[str, list[float]], list[int], list[int]]:
    """Times of a stage's actions by kind, growth of memory in its forwards, sizes of its messages."""
    times: defaultdict[str, list[float]] = defaultdict(list)
    grown, sent = [], []
    for rank in recording.ranks:
        before: int | None = None
        for action in rank.actions:
            if action.step != step.number:
                continue
            if action.stage == stage and action.computes:
                times[action.kind].append(action.end_ms - action.start_ms)
                if action.kind == "F" and action.memory is not None and before is not None:
                    grown.append(action.memory - before)
            if action.stage == stage and action.kind.startswith("SEND"):
                sent.append(action.message_bytes)
            before = before if action.memory is None else action.memory
    return times, grown, sent


def traffic_table(recording: Recording, step: Step) -> TextTable | None:
    """Communications of a rank in a step, on the mean, by group and kind; None: there were none."""
    counts: defaultdict[tuple[str, str], list[int]] = defaultdict(lambda: [0, 0, 0])
    for rank in recording.ranks:
        for row in rank.traffic:
            if row.step == step.number:
                total = counts[row.group, row.kind]
                for index, number in enumerate((1, row.num_calls, row.num_bytes)):
                    total[index] += number
    rows = [
        (group or _NONE, kind.replace("_", "-"), f"{ranks}", f"{count / ranks:,.1f}", format_bytes(size / ranks))
        for (group, kind), (ranks, count, size) in sorted(counts.items(), key=lambda item: -item[1][2])
    ]
    return TextTable(("group", "kind", "ranks", "times", "bytes"), rows, left=(0, 1)) if rows else None


def prediction_table(prediction: Prediction) -> TextTable:
    """Measured and simulated times of a pipeline's ranks in the step, and of the pipeline."""
    lines = (prediction.measured, prediction.timeline)
    rows = []
    for position in range(prediction.timeline.num_ranks):
        busy = [line.busy_ms(position) for line in lines]
        idle = [f"{100 * (1 - ms / (line.makespan_ms or 1)):.1f} %" for ms, line in zip(busy, lines, strict=True)]
        rows.append((f"{position}", *(f"{ms:,.2f}" for ms in busy), *idle))
    totals = (
        "all, from first to last",
        *(f"{line.makespan_ms:,.2f}" for line in lines),
        *(f"{100 * line.idle_share:.1f} %" for line in lines),
    )
    titles = ("position", "computes ms, measured", "simulated", "idle, measured", "simulated")
    return TextTable(titles, rows, totals)
