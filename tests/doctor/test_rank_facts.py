from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from doctor.facts import FACTS, several

from hybridpp.cluster import Loopback, current_world
from hybridpp.doctor import rank_facts
from hybridpp.doctor.devices import DeviceFacts, visible_devices
from hybridpp.doctor.rank_facts import all_facts, backend_choice

DEVICES = [
    DeviceFacts(name="H100", hardware=f"GPU-{n}", memory_bytes=2**36, capability="9.0", peers=(1 - n,)) for n in (0, 1)
]


def test_every_rank_gets_the_facts_of_all(monkeypatch):
    monkeypatch.setattr(rank_facts, "visible_devices", lambda: (DEVICES, ""))
    first, second = Loopback(2).run(lambda: all_facts(current_world()))
    assert first == second
    assert [one.rank for one in first] == [0, 1]
    assert first[0].versions["torch"] == torch.__version__
    assert first[0].devices == DEVICES
    assert first[0].host == second[1].host


@pytest.mark.parametrize(
    ("ranks", "expected"),
    [
        ([FACTS], ("gloo", "there is no CUDA device")),
        ([replace(FACTS, devices=DEVICES)], ("nccl", "every rank has a CUDA device of its own")),
        (
            [replace(one, hardware=f"GPU-{one.rank}") for one in several(2)],
            ("nccl", "every rank has a CUDA device of its own"),
        ),
        (
            [replace(one, hardware="GPU-0") for one in several(2)],
            ("gloo", "ranks 0, 1 share GPU-0 of host host0"),
        ),
    ],
    ids=["cpu", "devices", "own", "shared"],
)
def test_the_backend_is_explained(monkeypatch, ranks, expected):
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: True)
    assert backend_choice(ranks) == expected


def test_a_build_without_nccl_is_the_reason(monkeypatch):
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: False)
    assert backend_choice([replace(FACTS, devices=DEVICES)]) == ("gloo", "this build of torch has no NCCL")


def test_devices_are_described_with_what_they_reach(monkeypatch):
    properties = SimpleNamespace(name="H100", total_memory=2**36, major=9, minor=0, uuid="ab-1")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda device, other: device == 0)
    first, second = visible_devices()[0]
    assert (first.hardware, first.capability, first.peers, second.peers) == ("GPU-ab-1", "9.0", (1,), ())


def test_why_torch_finds_no_device_is_kept(monkeypatch):
    def none():
        import warnings

        warnings.warn("The NVIDIA driver on your system is too old (found version 11040).", stacklevel=1)
        return False

    monkeypatch.setattr(torch.cuda, "is_available", none)
    assert visible_devices() == ([], "The NVIDIA driver on your system is too old (found version 11040).")
