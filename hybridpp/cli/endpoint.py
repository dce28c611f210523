"""The endpoint at which the hosts of a job meet, as a host sees it that is not the endpoint."""

import contextlib
import socket
import time

_ATTEMPT_S = 2.0
_PAUSE_S = 0.5


def wait_for_endpoint(host: str, port: int, patience_s: float) -> bool:
    """Wait until a launcher listens there, or ``patience_s`` seconds; returns whether one does.

    Torch would wait in native code, where neither Ctrl-C nor another signal ends it.
    """
    until = time.monotonic() + patience_s
    while True:
        with contextlib.suppress(OSError), socket.create_connection((host, port), _ATTEMPT_S):
            return True
        if time.monotonic() >= until:
            return False
        time.sleep(_PAUSE_S)
