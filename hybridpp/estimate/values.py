"""An estimate as plain values, for JSON."""

from typing import Any

from hybridpp.estimate.layout_estimate import LayoutEstimate, RankEstimate


def parts_of(rank: RankEstimate) -> dict[str, int]:
    """The parts of a rank's memory at the peak, in bytes."""
    state, step = rank.state, rank.step
    return {
        "weights": state.weights,
        "gradients": state.gradients,
        "masters": state.masters,
        "moments": state.moments,
        "activations": step.activations,
        "logits": step.logits,
        "update": rank.update,
        "buffers": state.buffers + step.messages,
    }


def peak_of(rank: RankEstimate) -> str:
    """What a rank does at the peak: an action, or the optimizer's update; "" where it runs nothing."""
    return "update" if rank.update else str(rank.step.action or "")


def values_of(estimate: LayoutEstimate) -> dict[str, Any]:
    """The estimate as JSON has it: bytes and milliseconds."""
    sizes, time = estimate.sizes, estimate.time
    return {
        "world_size": sizes.world_size,
        "dp_size": estimate.num_replicas,
        "microbatch_size": sizes.microbatch_size,
        "num_microbatches": sizes.num_microbatches,
        "global_batch": estimate.global_batch,
        "settings": dict(estimate.settings),
        "alike": [dict(one) for one in estimate.alike],
        "ranks": [
            {
                "position": rank.position,
                "stages": list(rank.stages),
                "bytes": parts_of(rank) | {"total": rank.total},
                "host_bytes": rank.state.host,
                "peak_at": peak_of(rank) or None,
            }
            for rank in estimate.ranks
        ],
        "peak_bytes": estimate.worst.total,
        "time": {
            "step_ms": time.step_ms,
            "passes_ms": time.passes_ms,
            "update_ms": time.update_ms,
            "busy_ms": time.busy_ms,
            "idle_share": time.idle_share,
            "samples_per_s": estimate.samples_per_s,
            "is_measured": estimate.is_measured,
        },
    }
