"""What costs most in a step beside computation, and what to do about it."""

from collections.abc import Iterator, Sequence
from statistics import fmean
from typing import NamedTuple

from hybridpp.report.prediction import Prediction, balanced_ms, other_schedules
from hybridpp.report.recording import Recording
from hybridpp.report.steps import RankUse, Step

# Of a step: less is not worth a sentence.
_LEAST_SHARE = 0.03


class Cost(NamedTuple):
    """A cost of a step, in milliseconds of a rank on the mean, with what it is and what to do, in a sentence or two."""

    ms: float
    what: str
    way_out: str


def costs_of(recording: Recording, step: Step, uses: Sequence[RankUse], prediction: Prediction | str) -> list[Cost]:
    """What a step costs beside computation, the largest first; small costs are left out."""
    found = [*_of_pipeline(recording, step, prediction), *_of_phases(uses)]
    least_ms = _LEAST_SHARE * step.duration_ms
    return sorted((cost for cost in found if cost.ms >= least_ms), key=lambda cost: -cost.ms)


def _of_pipeline(recording: Recording, step: Step, prediction: Prediction | str) -> Iterator[Cost]:
    if isinstance(prediction, str) or len(prediction.programs) == 1:
        return
    timeline, num_ranks = prediction.timeline, len(prediction.programs)
    computing_ms = fmean(timeline.busy_ms(rank) for rank in range(num_ranks))
    bubble_ms = prediction.predicted_ms - computing_ms
    uneven_ms = max(0.0, prediction.predicted_ms - balanced_ms(prediction))
    if uneven_ms:
        slowest, ratio = slowest_stage(prediction)
        yield Cost(
            uneven_ms,
            f"stages of unequal length: stage {slowest} computes {ratio:.2f} times as long as the mean stage",
            'Move layers with layers_per_stage, or let balance="time" find the cut.',
        )
    schedule, num_microbatches = recording.settings.get("schedule"), _num_microbatches(prediction)
    faster = [one for one in other_schedules(prediction)[:1] if one.step_ms < 0.98 * prediction.predicted_ms]
    advice = f"More than {num_microbatches} micro-batches make it a smaller share."
    if faster:
        advice += (
            f' schedule="{faster[0].name}" would take {faster[0].step_ms:,.4g} ms instead of '
            f"{prediction.predicted_ms:,.4g}, as simulated, and holds no more."
        )
    yield Cost(
        bubble_ms - uneven_ms, f"idle time of the pipeline, as the schedule {schedule} has it at equal stages", advice
    )
    measured_ms = prediction.measured_ms[prediction.steps.index(step.number)]
    yield Cost(
        measured_ms - prediction.predicted_ms,
        "actions that take longer than on the mean, while other ranks wait for them",
        "Look for what disturbs a rank: other processes, uneven inputs, a host with fewer cores than ranks.",
    )


def _of_phases(uses: Sequence[RankUse]) -> Iterator[Cost]:
    def mean(name: str) -> float:
        return fmean(use.ms[name] for use in uses)

    yield Cost(
        mean("collectives"),
        "waits in collectives inside of actions, most of them of ranks that share layers",
        "A smaller tp_size sends less; tensor-parallel ranks need links as fast as those inside a host.",
    )
    yield Cost(
        mean("read"),
        "reading and checking the batch",
        "Give the dataloader num_workers, so that the next batch is read during the step.",
    )
    yield Cost(
        mean("end"),
        "the end of the step: sums over replicas, exchange of losses and norms",
        "Larger batches, or booster.no_sync, sum less often.",
    )
    yield Cost(
        mean("ranks"),
        "waits for other ranks at the start and the end of the step, where all exchange a few numbers",
        "They wait for the slowest one. Without max_norm, in fp32 and bf16, ranks need not wait for each other there.",
    )
    yield Cost(
        mean("update"),
        "the update of the weights",
        "Replicas can divide it (zero_stage=1), and a fused optimizer is faster.",
    )
    yield Cost(
        mean("between"),
        "time between actions, of the host",
        "Fewer, larger micro-batches have less of it; compile_blocks=True starts fewer kernels.",
    )


def slowest_stage(prediction: Prediction) -> tuple[int, float]:
    """The stage that computes longest for a micro-batch, and its time relative to the mean stage."""
    costs = prediction.costs
    kinds = {action.kind for program in prediction.programs for action in program}
    totals = [sum(costs.compute_ms(stage, kind) for kind in kinds) for stage in range(costs.num_stages)]
    slowest = max(range(len(totals)), key=totals.__getitem__)
    return slowest, totals[slowest] / (fmean(totals) or 1.0)


def _num_microbatches(prediction: Prediction) -> int:
    return 1 + max(action.microbatch or 0 for program in prediction.programs for action in program)
