"""The time of a step: a schedule simulated with the times of a model's units, and of what ranks send."""

from collections.abc import Sequence
from dataclasses import dataclass

from hybridpp.config import ZeroConfig
from hybridpp.estimate.devices import DeviceProfile
from hybridpp.estimate.unit_times import UnitTimes
from hybridpp.simulate import Costs, PreparedStep, StepEnds, ends_on_cores


@dataclass(frozen=True, kw_only=True)
class StageWork:
    """What a stage runs and sends.

    Attributes:
        first, last: its calls of units.
        sent: bytes of a message to the next stage.
        gradients: bytes of its parameters' gradients on a rank.
        weights: bytes of these parameters.
    """

    first: int
    last: int
    sent: int
    gradients: int
    weights: int


@dataclass(frozen=True, kw_only=True)
class Grid:
    """Sizes of a job: the ranks of a host are neighbours, of which tensor-parallel ones are the nearest.

    Attributes:
        tp_size, pp_size, num_replicas: ranks on each axis.
        zero: what replicas divide.
    """

    tp_size: int
    pp_size: int
    num_replicas: int
    zero: ZeroConfig

    @property
    def world_size(self) -> int:
        """Ranks of the job."""
        return self.tp_size * self.pp_size * self.num_replicas


@dataclass(frozen=True, kw_only=True)
class StepTime:
    """The time of a step, in milliseconds.

    Attributes:
        step_ms: all of it.
        passes_ms: from the first forward to the last backward pass and reduction of gradients.
        update_ms: of the optimizer, with the gathering of weights.
        busy_ms: what the busiest rank computes.
        idle_share: the share of all ranks' time in which they do not compute, from 0 to 1.
    """

    step_ms: float
    passes_ms: float
    update_ms: float
    busy_ms: float
    idle_share: float


def stage_costs(
    times: UnitTimes, works: Sequence[StageWork], ranks: Sequence[int], device: DeviceProfile, grid: Grid
) -> Costs:
    """Costs of a schedule's actions.

    Args:
        times: of the model's units.
        works: of each stage.
        ranks: the rank of each stage in its pipeline.
        device: that computes.
        grid: the job.
    """
    weight = [1e3 * times.weight_gradients(one.first, one.last) for one in works]
    backward = [1e3 * times.backward(one.first, one.last) for one in works]
    sends = [_send_ms(work.sent, ranks[stage], ranks[stage + 1], device, grid) for stage, work in enumerate(works[:-1])]
    return Costs(
        num_stages=len(works),
        forward_ms=tuple(1e3 * times.forward(one.first, one.last) for one in works),
        # Without W, all of the backward pass is B.
        backward_ms=tuple(one + other for one, other in zip(backward, weight, strict=True)),
        input_gradient_ms=tuple(backward),
        weight_gradient_ms=tuple(weight),
        # On a CPU, messages are the work of those who send and receive them.
        send_ms=0.0 if device.is_cpu else tuple(sends),
        post_ms=_posts(sends, len(works)) if device.is_cpu else 0.0,
        reduce_ms=tuple(_reduce_ms(work.gradients, device, grid) for work in works),
    )


def _posts(sends: Sequence[float], num_stages: int) -> tuple[float, ...]:
    """Of each stage, the time that its rank spends on a message: half of what both ends do."""
    around = [[*sends[max(stage - 1, 0) : stage], *sends[stage : stage + 1]] for stage in range(num_stages)]
    return tuple(sum(one) / len(one) / 2 if one else 0.0 for one in around)


def _send_ms(size: int, rank: int, other: int, device: DeviceProfile, grid: Grid) -> float:
    host = device.devices_per_host
    # Neighbours may be on two hosts.
    is_near = rank * grid.tp_size // host == other * grid.tp_size // host
    speed = device.link_bytes_per_s(0 if is_near else host)
    return 1e3 * size / speed + device.message_us * 1e-3


def _reduce_ms(size: int, device: DeviceProfile, grid: Grid) -> float:
    replicas = grid.num_replicas
    if replicas == 1:
        return 0.0
    passes = 2 if grid.zero.zero_stage == 0 else 1
    return passes * _ring_ms(size, replicas, device, grid)


def _ring_ms(size: int, replicas: int, device: DeviceProfile, grid: Grid) -> float:
    span = grid.tp_size * grid.pp_size * (replicas - 1)
    return 1e3 * device.sum_s(size * (replicas - 1) / replicas, span)


def update_ms(state_bytes: int, works: Sequence[StageWork], device: DeviceProfile, grid: Grid) -> float:
    """Time of the optimizer's update on a rank, and of gathering the weights.

    Args:
        state_bytes: gradients, masters and moments that the rank updates.
        works: of the rank's stages.
        device: that computes.
        grid: the job.
    """
    moved = 2 * state_bytes + sum(work.weights for work in works)
    gathered = 0.0
    # At stage 3 the weights of a pipeline's stages are gathered once, too; those of units for each pass.
    if grid.zero.zero_stage and grid.num_replicas > 1 and (grid.zero.zero_stage < 3 or grid.pp_size > 1):
        gathered = _ring_ms(sum(work.weights for work in works), grid.num_replicas, device, grid)
    return 1e3 * moved / ((device.update_gib_s or device.memory_gib_s) * 2**30) + gathered


def rank_ends(step: PreparedStep, costs: Costs, device: DeviceProfile, grid: Grid) -> StepEnds:
    """When the ranks of a pipeline are done, without what they reduce over replicas.

    Args:
        step: with its schedule.
        costs: of its actions; ``reduce_ms`` does not count.
        device: that computes.
        grid: the job.
    """
    cores = _cores(device, grid)
    if cores is None:
        return step.ends(lambda programs: programs.ends(costs))
    copies = grid.tp_size * grid.num_replicas
    return step.ends(lambda programs: ends_on_cores(programs, costs, copies, cores))


def _cores(device: DeviceProfile, grid: Grid) -> float | None:
    """Of all hosts of the job; None: each rank has a device."""
    return None if device.cores is None else device.cores * max(1.0, grid.world_size / device.devices_per_host)


def step_time(
    step: PreparedStep, costs: Costs, update: float, device: DeviceProfile, grid: Grid, ends: StepEnds | None = None
) -> StepTime:
    """The time of a step.

    Args:
        step: with its schedule.
        costs: of its actions.
        update: milliseconds of the optimizer's update.
        device: that computes.
        grid: the job.
        ends: of :func:`rank_ends` with these costs; None: they are simulated.
    """
    ends = ends or rank_ends(step, costs, device, grid)
    cores = _cores(device, grid)
    reductions = [costs.reducing_ms(stage) for stage in range(costs.num_stages)]
    repeated = _repeated_reductions_ms(costs, step.ranks, step.num_microbatches, grid)
    if cores is None:
        passes = max(ends.reduced_ms(step.ranks, reductions), repeated)
    else:
        # All ranks reduce and update at once.
        crowd = max(1.0, grid.world_size / cores)
        passes = max(ends.reduced_ms(step.ranks, [crowd * one for one in reductions]), ends.end_ms + crowd * repeated)
        update *= crowd
    total = passes + update
    return StepTime(
        step_ms=total,
        passes_ms=passes,
        update_ms=update,
        busy_ms=max(ends.busy_ms),
        idle_share=max(0.0, 1 - sum(ends.busy_ms) / len(ends.busy_ms) / total) if total else 0.0,
    )


def _repeated_reductions_ms(costs: Costs, ranks: Sequence[int], num_microbatches: int, grid: Grid) -> float:
    """Of gradients that are reduced, and weights that are gathered, for each micro-batch."""
    if grid.num_replicas == 1 or not grid.zero.reduces_each_microbatch:
        return 0.0
    # Stage 3 with one stage gathers the weights of a unit for each pass.
    factor = 2 if grid.zero.zero_stage == 3 and len(ranks) == 1 else 1
    by_rank: dict[int, float] = {}
    for stage, rank in enumerate(ranks):
        by_rank[rank] = by_rank.get(rank, 0.0) + costs.reducing_ms(stage)
    return factor * num_microbatches * max(by_rank.values())
