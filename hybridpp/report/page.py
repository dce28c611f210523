"""The page of a report: one HTML file that loads nothing."""

from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from typing import Any, NamedTuple

from jinja2 import Environment, PackageLoader, StrictUndefined

from hybridpp.errors import ConfigError
from hybridpp.report.advice import Cost, costs_of, slowest_stage
from hybridpp.report.estimate_table import estimate_table
from hybridpp.report.page_data import page_data, shown_steps
from hybridpp.report.prediction import Prediction, predict
from hybridpp.report.recording import Recording
from hybridpp.report.steps import USES, RankUse, Step, median_step, readings, steps_of, use_of
from hybridpp.report.tables import (
    held_table,
    memory_table,
    prediction_table,
    stage_table,
    traffic_table,
    use_table,
)
from hybridpp.sizes import format_bytes


class Tile(NamedTuple):
    """A number at the top of the page."""

    label: str
    value: str
    note: str


@dataclass(frozen=True)
class ReportSummary:
    """What a report says first, also as text.

    Attributes:
        title: of the page.
        tiles: the numbers.
        costs: what costs most, the largest first.
        headline: the first of it in a sentence.
    """

    title: str
    tiles: tuple[Tile, ...]
    costs: tuple[Cost, ...]
    headline: str


class _Facts(NamedTuple):
    recording: Recording
    steps: list[Step]
    step: Step
    uses: list[RankUse]
    predictions: dict[tuple[int, int], Prediction]
    unpredicted: str


def render_page(recording: Recording, estimate: Mapping[str, Any] | None = None) -> tuple[str, ReportSummary]:
    """The page, and its summary.

    Args:
        recording: of one step or more.
        estimate: what ``hybridpp estimate --json`` printed for this layout; None: it is not compared.

    Raises:
        ConfigError: no step is complete, or the estimate is none.
    """
    facts = _facts(recording)
    summary = _summary(facts)
    shown = shown_steps(recording, facts.steps, facts.step)
    environment = Environment(
        loader=PackageLoader("hybridpp.report", "assets"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    prediction = facts.predictions.get((0, 0))
    page = environment.get_template("report.html").render(
        summary=summary,
        recording=recording,
        step=facts.step,
        num_steps=len(facts.steps),
        num_shown=len(shown),
        uses=[(use, _bars(use, facts.step)) for use in facts.uses],
        use_names={name: words for name, words in USES.items() if any(use.ms[name] >= 5e-4 for use in facts.uses)},
        use_table=use_table(facts.uses, facts.step),
        memory_table=memory_table(recording, facts.step),
        memory_note=_MEMORY_NOTES[recording.ranks[0].memory_kind],
        held_table=held_table(recording),
        stage_table=stage_table(recording, facts.step),
        traffic_table=traffic_table(recording, facts.step),
        prediction_table=None if prediction is None else prediction_table(prediction),
        measured_in=_measured_in(prediction),
        unpredicted=facts.unpredicted,
        estimate_table=None if estimate is None else estimate_table(recording, facts.step, estimate),
        facts=[*recording.settings.items(), *recording.versions.items(), ("recorded", recording.created)],
        data=page_data(recording, shown, facts.step, facts.predictions),
        style=_asset("report.css"),
        script="\n".join(map(_asset, _SCRIPTS)),
    )
    return page, summary


# They share one scope.
_SCRIPTS = ("base.js", "gantt.js", "memory.js", "controls.js", "start.js")
_MEMORY_NOTES = {
    "device": "What torch has allocated on the device, read by the host when it launched the end of each action.",
    "allocated": "What the rank's process has of malloc (tensors, and what else it allocates), read after each action.",
    "resident": "Pages of the rank's process that are in memory, read after each action.",
    "shared": "Not read: the ranks are threads of one process, which share its memory.",
    None: "Not read: this host does not say how much a process has in use.",
}


def _measured_in(prediction: Prediction | None) -> str:
    """The steps whose times are simulated, in words."""
    num_steps = 1 if prediction is None else len(prediction.steps)
    return "this step" if num_steps == 1 else f"{num_steps} steps of about this length"


def _asset(name: str) -> str:
    return resources.files("hybridpp.report").joinpath("assets", name).read_text(encoding="utf-8")


def _facts(recording: Recording) -> _Facts:
    steps = steps_of(recording)
    step = median_step(steps)
    if step is None:
        raise ConfigError(
            "the recording has no step: nothing ran inside booster.record_timeline. Call booster.execute_pipeline in "
            "its block."
        )
    predictions, unpredicted = {}, ""
    for dp, tp in recording.pipelines():
        found = predict(recording, step.number, dp, tp)
        if isinstance(found, str):
            # The page has a table of the first replica's pipeline, or says why there is none.
            unpredicted = found if (dp, tp) == (0, 0) else unpredicted
        else:
            predictions[dp, tp] = found
    uses = [use_of(rank, step) for rank in recording.ranks]
    return _Facts(recording, steps, step, uses, predictions, unpredicted)


def _summary(facts: _Facts) -> ReportSummary:
    recording, step = facts.recording, facts.step
    prediction = facts.predictions.get((0, 0))
    costs = costs_of(recording, step, facts.uses, facts.unpredicted if prediction is None else prediction)
    computing = sum(use.computing_ms for use in facts.uses) / len(facts.uses)
    share = computing / (step.duration_ms or 1)
    headline = f"Ranks compute for {100 * share:.0f} % of the step"
    if costs:
        rest_ms = (1 - share) * step.duration_ms
        part = "Most" if costs[0].ms > rest_ms / 2 else "The largest part"
        headline += f". {part} of the rest is {costs[0].what}: {costs[0].ms:,.3g} ms of {step.duration_ms:,.4g}."
    else:
        headline += ", and nothing else takes more than a thirtieth of it."
    return ReportSummary(
        f"{recording.model} on {len(recording.ranks)} rank{'s' * (len(recording.ranks) > 1)}",
        tuple(_tiles(facts, prediction, share)),
        tuple(costs),
        headline,
    )


def _tiles(facts: _Facts, prediction: Prediction | None, computing_share: float) -> list[Tile]:
    durations = [step.duration_ms for step in facts.steps]
    spread = f"{min(durations):,.4g} to {max(durations):,.4g} ms"
    counted = f"step {facts.step.number} of {len(durations)}, which take {spread}" if len(durations) > 1 else "one step"
    idle = "of the ranks' time: idle, waits, messages, update"
    tiles = [
        Tile("Step", f"{facts.step.duration_ms:,.4g} ms", counted),
        Tile("Not computing", f"{100 * (1 - computing_share):.1f} %", idle),
    ]
    if prediction is not None:
        slowest, ratio = slowest_stage(prediction)
        even = "all stages take about equal times" if ratio < 1.05 else f"{ratio:.2f} times the mean stage"
        name = f"stage {slowest}" if len(facts.recording.stages) > 1 else "the only one"
        measured = prediction.measured.makespan_ms
        off = 100 * (prediction.predicted_ms / (measured or 1) - 1)
        tiles.append(Tile("Slowest stage", name, even))
        note = f"for actions that took {measured:,.4g} ({off:+.1f} %)"
        tiles.append(Tile("Simulated", f"{prediction.predicted_ms:,.4g} ms", note))
    read = [(max(found), rank) for rank in facts.recording.ranks if (found := readings(rank, facts.step.number))]
    if read:
        most, rank = max(read, key=lambda pair: pair[0])
        tiles.append(Tile("Most memory", format_bytes(most), f"in use on rank {rank.rank} after an action"))
    return tiles


def _bars(use: RankUse, step: Step) -> list[tuple[str, float, str]]:
    """The parts of a rank's time: name of the use, per cent of the step, and words."""
    total = step.duration_ms or 1
    return [
        (name, 100 * ms / total, f"{USES[name]}: {ms:,.2f} ms, {100 * ms / total:.1f} %")
        for name, ms in use.ms.items()
        if ms > 0
    ]
