"""Estimates of layouts, as tables."""

from hybridpp.estimate import DeviceProfile, LayoutEstimate, parts_of, peak_of
from hybridpp.text_table import TextTable

_GIB = 2**30


def render_estimate(estimate: LayoutEstimate, device: DeviceProfile) -> list[str | TextTable]:
    """A line per place in the pipeline with the GiB of each of its ranks, then the time of a step."""
    unit, size = ("GiB", _GIB) if estimate.worst.total >= _GIB else ("MiB", 2**20)
    parts = [parts_of(rank) for rank in estimate.ranks]
    columns = [name for name in parts[0] if name != "update" or any(one[name] for one in parts)]
    titles = ("rank", "stages", *columns, "total", "peak at")
    rows = [
        (
            str(rank.position),
            ",".join(map(str, rank.stages)),
            *(f"{number / size:,.3f}" for number in (*(own[name] for name in columns), rank.total)),
            peak_of(rank),
        )
        for rank, own in zip(estimate.ranks, parts, strict=True)
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
