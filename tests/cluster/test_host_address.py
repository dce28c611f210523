"""The address of a host that other hosts reach, and its network interface."""

import os
import socket

import pytest
import torch
from processes import run_ranks
from two_hosts import hosts_or_skip, on_hosts

from hybridpp.cluster import DistCoordinator, current_world, environment_of_jobs
from hybridpp.cluster.host_address import (
    address_between_hosts,
    address_towards,
    addresses_of,
    interface_with,
    is_loopback,
    is_own,
)


def test_this_host_reaches_itself_over_its_loopback_interface():
    assert address_towards("127.0.0.1") == "127.0.0.1"
    assert is_loopback(address_towards("localhost"))
    assert (interface_with("127.0.0.1"), interface_with("192.0.2.1")) == ("lo", "")
    assert [is_own(one) for one in ("localhost", "0.0.0.0", "192.0.2.1", "no such name")] == [True, True, False, False]
    assert (address_towards("no such name"), address_towards("")) == ("", "")


@pytest.mark.parametrize("name", [".", "a..b", "h" * 64])
def test_what_can_be_no_name_is_known_to_nobody(name):
    assert (address_towards(name), addresses_of(name), is_own(name)) == ("", set(), False)


def test_a_host_that_binds_any_address_has_only_its_own(monkeypatch):
    monkeypatch.setattr(socket.socket, "bind", lambda *_: None)  # as with net.ipv4.ip_nonlocal_bind=1
    assert not is_own("192.0.2.1")


@pytest.mark.parametrize(
    ("address", "expected"), [("127.0.1.1", True), ("::1", True), ("10.0.0.1", False), ("fe80::1%eth0", False)]
)
def test_loopback_addresses(address, expected):
    assert is_loopback(address) is expected


@pytest.mark.parametrize(
    ("own", "addresses", "expected"),
    [
        ("127.0.0.1", ["127.0.0.1"] * 2, ""),
        ("10.0.0.1", ["10.0.0.1"] * 2, ""),
        ("10.0.0.2", ["10.0.0.1", "10.0.0.2"], "10.0.0.2"),
        ("10.0.0.2", ["127.0.1.1", "10.0.0.2"], "10.0.0.2"),
        ("", ["10.0.0.1", "10.0.0.2"], "192.0.2.7"),
        ("127.0.1.1", ["127.0.1.1", "10.0.0.2"], "192.0.2.7"),
    ],
)
def test_hosts_reach_each_other_at_the_address_on_the_way_to_the_store(monkeypatch, own, addresses, expected):
    monkeypatch.setattr("hybridpp.cluster.host_address.address_towards", lambda host: "192.0.2.7")
    assert address_between_hosts(own, addresses) == expected


NAMES = {
    "known": lambda host, other: {host.name: host.address, other.name: other.address},
    "its own name is a loopback address": lambda host, other: {host.name: "127.0.1.1", other.name: other.address},
    "unknown": lambda host, other: {},
}


@pytest.mark.timeout(120)
@pytest.mark.parametrize("names", NAMES)
def test_ranks_of_two_hosts_connect_whatever_the_hosts_call_themselves(names):
    def meet():
        world = current_world()
        group = world.split([[0, 1]])
        gathered = [part.item() for part in group.all_gather(torch.tensor(world.rank))]
        used = os.environ["GLOO_SOCKET_IFNAME"]
        assert "GLOO_SOCKET_IFNAME" not in environment_of_jobs(), "the user has not set it"
        DistCoordinator().destroy()
        assert "GLOO_SOCKET_IFNAME" not in os.environ
        return socket.gethostname(), world.local_rank, used, gathered

    with hosts_or_skip() as hosts:
        for host, other in (hosts, hosts[::-1]):
            host.set_names({"localhost": "127.0.0.1", **NAMES[names](host, other)})
        found = run_ranks(meet, 2, **on_hosts(hosts, address="10.77.0.1" if names == "unknown" else "host0"))
    assert found == [("host0", 0, "cable", [0, 1]), ("host1", 0, "cable", [0, 1])]
