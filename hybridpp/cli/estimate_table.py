"""Estimates of layouts, as tables."""

from hybridpp.estimate import DeviceProfile, LayoutEstimate, parts_of
from hybridpp.text_table import TextTable

_GIB = 2**30


def render_estimate(estimate: LayoutEstimate, device: DeviceProfile) -> list[str | TextTable]:
    """A line per place in the pipeline with the GiB of each of its ranks, then the time of a step."""
    unit, size = ("GiB", _GIB) if estimate.worst.total >= _GIB else ("MiB", 2**20)
    titles = ("rank", "stages", *parts_of(estimate.ranks[0]), "total", "peak at")
    rows = [
        (
            str(rank.position),
            ",".join(map(str, rank.stages)),
            *(f"{number / size:,.3f}" for number in (*parts_of(rank).values(), rank.total)),
            str(rank.step.action or ""),
        )
        for rank in estimate.ranks
    ]
    sizes = estimate.sizes
    head = (
        f"{unit} of each rank at the peak of a step: {sizes.world_size} ranks, {_counted(estimate.num_replicas)}, "
        f"{sizes.num_microbatches} micro-batches of {sizes.microbatch_size}"
    )
    return [
        head,
        "",
        TextTable(titles, rows),
        "",
        *_host(estimate),
        *_fit(estimate, device),
        *_times(estimate, device),
    ]


def _counted(num_replicas: int) -> str:
    return f"{num_replicas} replica{'s' if num_replicas > 1 else ''}"


def _host(estimate: LayoutEstimate) -> list[str]:
    most = max(rank.state.host for rank in estimate.ranks)
    return [f"in host memory: {most / _GIB:,.3f} GiB of a rank"] if most else []


def _fit(estimate: LayoutEstimate, device: DeviceProfile) -> list[str]:
    left = device.memory_gib - estimate.worst.total / _GIB
    if device.is_cpu:
        return []
    return [
        f"{device.name} has {device.memory_gib:g} GiB: "
        + (f"{left:,.2f} GiB are left" if left >= 0 else f"{-left:,.2f} GiB too little")
    ]


def _times(estimate: LayoutEstimate, device: DeviceProfile) -> list[str]:
    time = estimate.time
    source = "units measured" if estimate.is_measured else "from FLOPs and bytes"
    return [
        f"step on {device.name} ({source}): {time.step_ms:,.1f} ms, of which the update {time.update_ms:,.1f}; "
        f"{100 * time.idle_share:.0f} % idle; {estimate.samples_per_s:,.1f} samples per second"
    ]
