import os
import socket

from hybridpp.doctor import host
from hybridpp.doctor.host import host_facts


def test_this_host_is_described():
    facts = host_facts()
    assert facts.name == socket.gethostname()
    assert 1 <= facts.cores <= (os.cpu_count() or 1)
    assert facts.memory_bytes > 2**28
    assert facts.interfaces.get("lo", "127.0.0.1") == "127.0.0.1"
    assert facts.open_files[0] == -1 or facts.open_files[0] > 0


def test_limits_of_a_container_are_read(monkeypatch, tmp_path):
    (tmp_path / "cpu.max").write_text("150000 100000\n")
    (tmp_path / "memory.max").write_text("1073741824\n")
    thp = tmp_path / "enabled"
    thp.write_text("always madvise [never]\n")
    monkeypatch.setattr(host, "_CGROUP", tmp_path)
    monkeypatch.setattr(host, "_THP", thp)
    facts = host_facts()
    assert (facts.cpu_quota, facts.memory_limit_bytes, facts.huge_pages) == (1.5, 2**30, "never")
    (tmp_path / "cpu.max").write_text("max 100000\n")
    (tmp_path / "memory.max").write_text("max\n")
    facts = host_facts()
    assert (facts.cpu_quota, facts.memory_limit_bytes) == (None, None)


def test_a_system_that_tells_nothing_is_no_error(monkeypatch, tmp_path):
    def fail(*arguments, **options):
        raise OSError("no such thing")

    monkeypatch.setattr(host, "_CGROUP", tmp_path)
    monkeypatch.setattr(host, "_THP", tmp_path / "none")
    monkeypatch.setattr(socket, "getaddrinfo", fail)
    monkeypatch.setattr(socket, "if_nameindex", fail)
    facts = host_facts()
    assert (facts.addresses, facts.interfaces, facts.cpu_quota, facts.huge_pages) == ((), {}, None, None)
