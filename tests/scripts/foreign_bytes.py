"""Send foreign bytes to whatever listens on the hosts of ``two_hosts.py``, for some seconds: ``foreign_bytes.py 40``.

As port scanners do, and worse: other protocols, bytes that begin as those of torch's store and then name absurd sizes,
a pickle that would make a file. Some connections stay open without a byte, some are reset. The ports are those that are
open on the host that this runs on; both hosts get bytes there.
"""

import contextlib
import random
import socket
import struct
import sys
import time
from pathlib import Path

NUM_OPEN = 400
# Of torch's store: a query, and the number with which a client begins.
_VALIDATE, _MAGIC = 0, 0x3C85F7CE
_HELLO = struct.pack("<BI", _VALIDATE, _MAGIC)
FOREIGN = {
    "nothing": b"",
    "http": b"GET / HTTP/1.1\r\nHost: example\r\n\r\n",
    "tls": bytes.fromhex("1603010200010001fc0303") + bytes(32),
    "zeros": bytes(8),
    "zeros, many": bytes(4096),
    "ones": b"\xff" * 64,
    "store, unknown query": _HELLO + b"\xfe" * 32,
    **{f"store, query {query} of 2**62 bytes": _HELLO + struct.pack("<BQ", query, 1 << 62) for query in range(1, 14)},
    "store, a key of 2**62 bytes in a list of 2**40": _HELLO + struct.pack("<BQQ", 4, 1 << 40, 1 << 62),
    "pickle": b"\x80\x04\x8c\x05posix\x8c\x06system\x93\x8c\x0etouch PICKLED_x\x85R.",
}


def send(seconds: float) -> None:
    """Prints how many connections were made."""
    dice, until = random.Random(5), time.monotonic() + seconds
    counts: dict[int, int] = {}
    silent: list[socket.socket] = []
    while time.monotonic() < until:
        ports = {
            int(line.split()[1].partition(":")[2], 16)
            for table in ("tcp", "tcp6")
            for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]
            if line.split()[3] == "0A"
        }
        for port in sorted(ports):
            for host in ("127.0.0.1", "10.77.0.1", "10.77.0.2"):
                for name, data in (*FOREIGN.items(), ("random", dice.randbytes(dice.randrange(1, 65536)))):
                    with contextlib.suppress(OSError):
                        connection = socket.create_connection((host, port), 0.5)
                        connection.settimeout(0.5)
                        counts[port] = counts.get(port, 0) + 1
                        if name != "nothing":
                            connection.sendall(data)
                        if len(silent) < NUM_OPEN and dice.random() < 0.5:
                            silent.append(connection)
                            continue
                        if dice.random() < 0.3:  # a reset
                            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                        connection.close()
        time.sleep(0.1)
    print(f"{sum(counts.values())} connections to {len(counts)} ports, {len(silent)} left open", flush=True)


send(float(sys.argv[1]))
