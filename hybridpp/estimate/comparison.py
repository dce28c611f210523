"""What makes one layout slower than another, in words; and the plugin call that makes a layout."""

from collections.abc import Mapping
from typing import Any

from hybridpp.estimate.layout_estimate import LayoutEstimate

SAME_TIME = 5e-4
"""The share of a step below which two layouts do not differ to who reads a table."""


def why_slower(estimate: LayoutEstimate, best: LayoutEstimate) -> str:
    """The main reason why a layout takes longer than the best one."""
    time, other = estimate.time, best.time
    idle = time.passes_ms - time.busy_ms, other.passes_ms - other.busy_ms
    differences = {
        "busy": time.busy_ms - other.busy_ms,
        "idle": idle[0] - idle[1],
        "update": time.update_ms - other.update_ms,
    }
    reason = max(differences, key=lambda name: differences[name])
    if time.step_ms - other.step_ms <= SAME_TIME * max(time.step_ms, other.step_ms):
        sizes = estimate.worst.total / 2**30, best.worst.total / 2**30
        if sizes[0] == sizes[1]:
            return "as fast"
        return f"as fast: a rank holds {sizes[0]:.2f} GiB ({sizes[1]:.2f})"
    if reason == "idle":
        shares = [f"{100 * _share(*one):.0f}" for one in ((idle[0], time.step_ms), (idle[1], other.step_ms))]
        # A longer step may wait as large a share of it.
        is_larger = int(shares[0]) > int(shares[1])
        (own, its), unit = (shares, " %") if is_larger else (_apart(*idle), " ms")
        return f"ranks wait {own}{unit} of the step, for others or for gradients ({its}{unit})"
    if reason == "update":
        own, its = _apart(time.update_ms, other.update_ms, 1)
        return f"the update takes {own} ms ({its})"
    own, its = _apart(time.busy_ms, other.busy_ms)
    return f"{_busier(estimate, best)}: a rank computes {own} ms ({its})"


def _apart(one: float, other: float, least_digits: int = 0) -> tuple[str, str]:
    """Two numbers with as many digits as tell them apart."""
    for digits in range(least_digits, 4):
        texts = f"{one:,.{digits}f}", f"{other:,.{digits}f}"
        if texts[0] != texts[1]:
            break
    return texts


def _busier(estimate: LayoutEstimate, best: LayoutEstimate) -> str:
    own, other = estimate.settings, best.settings
    if "gradient_checkpoint_config" in own and "gradient_checkpoint_config" not in other:
        return "blocks are recomputed"
    if own["tp_size"] > other["tp_size"]:
        return "more sums within layers"
    if estimate.sizes.microbatch_size < best.sizes.microbatch_size:
        return "smaller micro-batches"
    return "stages are less even" if own["pp_size"] > other["pp_size"] else "more work per rank"


def _share(part: float, of: float) -> float:
    return part / of if of else 0.0


def plugin_call(estimate: LayoutEstimate, precision: str) -> str:
    """The call that makes the plugin of a layout."""
    return f"HybridParallelPlugin({', '.join(f'{k}={v!r}' for k, v in plugin_keywords(estimate, precision).items())})"


def plugin_keywords(estimate: LayoutEstimate, precision: str) -> Mapping[str, Any]:
    """The keywords of the plugin of a layout."""
    return {
        **estimate.settings,
        "precision": precision,
        "num_microbatches": estimate.sizes.num_microbatches,
    }
