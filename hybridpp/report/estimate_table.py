"""What ``hybridpp estimate`` said of a layout, against what was recorded."""

from collections.abc import Mapping
from statistics import median
from typing import Any

from hybridpp.errors import ConfigError, text_of
from hybridpp.report.recording import Recording
from hybridpp.report.steps import Step, readings
from hybridpp.sizes import format_bytes
from hybridpp.text_table import TextTable

_LASTING = ("weights", "gradients", "masters", "moments")
_OF_MICROBATCHES = ("activations", "logits")


def estimate_table(recording: Recording, step: Step, estimate: Mapping[str, Any]) -> TextTable:
    """A line for the time of the step, and one for each part of the memory of each place of the pipeline.

    Args:
        recording: of the job.
        step: of which times are measured.
        estimate: parsed output of ``hybridpp estimate --json``.

    Raises:
        ConfigError: it is something else, or of another number of ranks of a pipeline.
    """
    try:
        step_ms, ranks = float(estimate["time"]["step_ms"]), list(estimate["ranks"])
        sizes = [{name: int(size) for name, size in rank["bytes"].items()} for rank in ranks]
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ConfigError(
            f"the estimate is not what `hybridpp estimate --json` prints: {type(error).__name__} {text_of(error)}. "
            "Write its output to the file."
        ) from error
    if len(sizes) != (positions := 1 + max(rank.pp for rank in recording.ranks)):
        raise ConfigError(
            f"the estimate is of {len(sizes)} ranks of a pipeline, and the recording of {positions}. Estimate with "
            f"--pp-size {positions}."
        )
    rows = [("step", _ms(step.duration_ms), _ms(step_ms), _off(step.duration_ms, step_ms))]
    for position, parts in enumerate(sizes):
        members = [rank for rank in recording.ranks if rank.pp == position]
        for name in _LASTING:
            measured = median(rank.held.get(name, 0) for rank in members)
            if measured or parts.get(name):
                rows.append((f"position {position}: {name}", *_sizes(measured, parts.get(name, 0))))
        grown = [max(read) - min(read) for rank in members if (read := readings(rank, step.number))]
        if grown:
            guess = sum(parts.get(name, 0) for name in _OF_MICROBATCHES)
            rows.append((f"position {position}: activations", *_sizes(median(grown), guess)))
    return TextTable(("what", "measured", "estimated", "off by"), rows)


def _ms(time_ms: float) -> str:
    return f"{time_ms:,.2f} ms"


def _sizes(measured: float, estimated: float) -> tuple[str, str, str]:
    return format_bytes(measured), format_bytes(estimated), _off(measured, estimated)


def _off(measured: float, estimated: float) -> str:
    return f"{100 * (estimated / measured - 1):+.1f} %" if measured else "-"
