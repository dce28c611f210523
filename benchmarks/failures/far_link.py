"""A link between two hosts that takes time and loses packets at random, for kernels without ``netem``.

A process passes packets on between a device of each host (TAP), which takes the place of their cable.
"""

import fcntl
import multiprocessing
import os
import random
import select
import struct
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.synchronize import Event

from mounts import CLONE_NEWUSER, checked, libc
from processes import after_fork
from two_hosts import CLONE_NEWNET, Host

# linux/if_tun.h
_TUNSETIFF, _IFF_TAP, _IFF_NO_PI = 0x400454CA, 0x0002, 0x1000
_MOST_BYTES = 65536
_START_S = 10.0


@contextmanager
def far_link(hosts: Sequence[Host], delay_s: float, loss: float) -> Iterator[None]:
    """Inside, each packet between the hosts arrives after ``delay_s``, or, with the probability ``loss``, never."""
    hosts[0].run("ip", "link", "delete", "cable")
    context = multiprocessing.get_context("fork")
    ready = context.Event()
    process = context.Process(target=_carry, args=([host.pid for host in hosts], delay_s, loss, ready))
    process.start()
    try:
        assert ready.wait(_START_S), "no device was made"
        for host in hosts:
            host.run(*f"ip address add {host.address}/24 dev cable".split())
            host.set_link(up=True)
        yield
    finally:
        process.kill()
        process.join()


def _carry(pids: Sequence[int], delay_s: float, loss: float, ready: Event) -> None:
    after_fork()
    user = os.open(f"/proc/{pids[0]}/ns/user", os.O_RDONLY)
    networks = [os.open(f"/proc/{pid}/ns/net", os.O_RDONLY) for pid in pids]
    checked(libc().setns(user, CLONE_NEWUSER))
    devices = []
    for network in networks:
        checked(libc().setns(network, CLONE_NEWNET))
        devices.append(os.open("/dev/net/tun", os.O_RDWR))
        fcntl.ioctl(devices[-1], _TUNSETIFF, struct.pack("16sH22x", b"cable", _IFF_TAP | _IFF_NO_PI))
    other, dice = {devices[0]: devices[1], devices[1]: devices[0]}, random.Random(1)
    under_way: deque[tuple[float, int, bytes]] = deque()
    ready.set()
    while True:
        pause_s = max(0.0, under_way[0][0] - time.monotonic()) if under_way else None
        for device in select.select(devices, [], [], pause_s)[0]:
            packet = os.read(device, _MOST_BYTES)
            if dice.random() >= loss:
                under_way.append((time.monotonic() + delay_s, other[device], packet))
        while under_way and under_way[0][0] <= time.monotonic():
            _, device, packet = under_way.popleft()
            os.write(device, packet)
