"""The address at which other hosts reach this one, and the network interface that has it.

Gloo takes the address that the host's own name has on that host. That is often 127.0.1.1 (Debian), or that of another
network, and other hosts then connect to nobody. The way to the job's store is known to work, so its address is taken.
"""

import contextlib
import socket
from collections.abc import Sequence
from ipaddress import ip_address

import psutil

# Nothing is sent there: a socket for datagrams that connects asks the kernel for the way alone.
_ANY_PORT = 9
# A name that nobody knows, or that can be none: it has an empty label, or one of more than 63 characters.
_UNKNOWN = (OSError, UnicodeError)
# All addresses of this host.
_ANY = ("0.0.0.0", "::")


def address_towards(host: str) -> str:
    """The address from which this host sends to another one; empty: there is no way there."""
    with contextlib.suppress(*_UNKNOWN):
        for family, kind, protocol, _, target in socket.getaddrinfo(host, _ANY_PORT, type=socket.SOCK_DGRAM):
            with contextlib.suppress(OSError), socket.socket(family, kind, protocol) as probe:
                probe.connect(target)
                return str(probe.getsockname()[0])
    return ""


def addresses_of(host: str) -> set[str]:
    """All addresses of a name, as this host knows it; none where it does not."""
    with contextlib.suppress(*_UNKNOWN):
        return {str(target[0]) for *_, target in socket.getaddrinfo(host, None)}
    return set()


def can_be_name(host: str) -> bool:
    """Whether this may be a name or an address of a host, known or not."""
    try:
        return bool(host.encode("idna"))
    except UnicodeError:
        return False


def is_loopback(address: str) -> bool:
    """Whether other hosts cannot reach an address."""
    with contextlib.suppress(ValueError):
        return ip_address(_without_zone(address)).is_loopback
    return False


def is_own(host: str) -> bool:
    """Whether an address, or a name of one, is this host's."""
    # Not whether a socket can be bound to it, which some hosts allow for all addresses.
    return any(one in _ANY or is_loopback(one) or interface_with(one) for one in addresses_of(host))


def address_between_hosts(own: str, addresses: Sequence[str]) -> str:
    """The address at which the ranks of other hosts reach this one; empty: all ranks are on this host, or nobody knows.

    Args:
        own: the address from which this rank reaches the job's store.
        addresses: those of all ranks.
    """
    others = [address for address in addresses if address and not is_loopback(address) and address != own]
    if own and not is_loopback(own):
        return own if others or any(map(is_loopback, addresses)) else ""
    # The store is on this host.
    return next((way for way in map(address_towards, others) if way and not is_loopback(way)), "")


def interface_with(address: str) -> str:
    """The name of the network interface of this host that has an address; empty: none has it."""
    wanted = _without_zone(address)
    for name, known in psutil.net_if_addrs().items():
        addresses = [each.address for each in known if each.family in (socket.AF_INET, socket.AF_INET6)]
        if wanted in map(_without_zone, addresses):
            return str(name)
    return ""


def _without_zone(address: str) -> str:
    return address.partition("%")[0]
