"""A file beside the checkpoints of a run that was told to stop, and has saved: it is to be started again.

The next resume removes it, and so does a save of a run that was not told to stop.
"""

import json
import signal

from hybridpp.checkpoint.remote_path import AnyPath, RemotePath


def marker_path(path: AnyPath) -> AnyPath:
    """The marker, given the folder of a run's checkpoints."""
    return path / "interrupted.json"


def write_marker(path: AnyPath, step: int, signal_number: int) -> None:
    """Write it, once the checkpoint counts.

    Args:
        path: the folder of the run's checkpoints.
        step: of the checkpoint.
        signal_number: that told the run to stop.

    Raises:
        OSError: it cannot be written.
    """
    name = signal.Signals(signal_number).name
    data = json.dumps({"step": step, "signal": name}).encode()
    marker = marker_path(path)
    if isinstance(marker, RemotePath):
        marker.write_bytes(data)
        return
    temporary = marker.with_suffix(".tmp")
    temporary.unlink(missing_ok=True)  # of a killed process, or a link, through which nothing is written
    with temporary.open("xb") as file:
        file.write(data)
    temporary.replace(marker)


def remove_marker(path: AnyPath) -> None:
    """Remove it, if there is one.

    Raises:
        OSError: it cannot be removed.
    """
    marker = marker_path(path)
    if marker.exists():
        marker.unlink(missing_ok=True)
