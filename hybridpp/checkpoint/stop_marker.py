"""A file beside the checkpoints of a run that was told to stop, and has saved: it is to be started again.

The next resume removes it, and so does a save of a run that was not told to stop.
"""

import json
import re
import secrets
import signal

from hybridpp.checkpoint.remote_path import AnyPath, RemotePath

_TEMPORARY = re.compile(r"interrupted\.[0-9a-f]{8}\.tmp", re.ASCII)


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
    for left in path.iterdir():
        if _TEMPORARY.fullmatch(left.name) and (left.is_symlink() or not left.is_dir()):
            left.unlink(missing_ok=True)  # of a killed process
    temporary = marker.with_suffix(f".{secrets.token_hex(4)}.tmp")
    with temporary.open("xb") as file:
        file.write(data)
    temporary.replace(marker)


def remove_marker(path: AnyPath) -> None:
    """Remove it, if there is one.

    Raises:
        OSError: it cannot be removed.
    """
    marker = marker_path(path)
    if marker.exists() or marker.is_symlink():  # also a link to nothing
        marker.unlink(missing_ok=True)
