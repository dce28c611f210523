import json
from contextlib import ExitStack

import pytest
from doctor.facts import FACTS, several
from forked_jobs import forked_job
from two_hosts import hosts_or_skip

from hybridpp.cli import doctor, main
from hybridpp.cli.doctor_tables import render_report
from hybridpp.doctor import DoctorReport, Problem
from hybridpp.doctor.devices import DeviceFacts
from hybridpp.doctor.link_speed import LinkSpeed, measured_pairs

ERROR = Problem(level="error", what="torch is old.", way_out="Update it.")


@pytest.fixture
def command():
    return "doctor"


def report(**changes):
    values = {"ranks": [FACTS], "backend": "gloo", "why": "there is no CUDA device", "links": [], "problems": []}
    return DoctorReport(**values | changes)


def links(num_ranks):
    return [LinkSpeed(*pair, 10.0 + n, 1.0 + n, 2.0 + n, "gloo") for n, pair in enumerate(measured_pairs(num_ranks))]


def text(*arguments, **changes):
    return "\n".join(map(str, render_report(report(*arguments, **changes))))


def test_this_host_is_examined(capsys):
    code = main(["doctor"])
    printed = capsys.readouterr()
    assert "backend of a job: " in printed.out
    assert printed.err == ""
    assert main(["doctor", "--json"]) == code
    plain = json.loads(capsys.readouterr().out)
    found = DoctorReport.from_plain(plain)
    assert json.loads(json.dumps(found.to_plain())) == plain
    assert code == found.has_errors
    assert len(found.ranks) == 1


def test_an_error_is_printed_and_is_the_exit_code(monkeypatch, capsys):
    monkeypatch.setattr(doctor, "examine", lambda world: report(problems=[ERROR]))
    assert main(["doctor"]) == 1
    assert capsys.readouterr().out.endswith("error: torch is old.\n  Update it.\n")


def test_two_ranks_are_started_and_measured(tmp_path):
    """On processes, from any folder."""
    with forked_job(main, "doctor", "--ranks", "2", "--json", cwd=tmp_path) as job:
        code = job.end(110)
        assert job.stdout, job.stderr
        found = DoctorReport.from_plain(json.loads(job.stdout))
    assert code == (1 if found.has_errors else 0)
    (link,) = found.links
    assert (link.first, link.second) == (0, 1)
    assert link.latency_us > 0
    assert link.gb_s > 0
    assert [one.local_rank for one in found.ranks] == [0, 1]


@pytest.mark.timeout(180)
def test_torchrun_on_two_hosts_measures_the_cable(tmp_path):
    endpoint, options = "10.77.0.1:29500", ["--nnodes", "2", "--nproc-per-node", "1", "--rdzv-backend", "c10d"]
    command = ["run", *options, "--rdzv-endpoint", endpoint, "-m", "hybridpp", "doctor", "--json"]
    with hosts_or_skip() as hosts, ExitStack() as stack:
        jobs = [stack.enter_context(forked_job(main, *command, move=host.enter)) for host in hosts]
        for job in jobs:
            job.end(150)
        told = [job.stdout for job in jobs]
    report = next(filter(None, told), "")
    assert report, [job.stderr for job in jobs]
    found = DoctorReport.from_plain(json.loads(report))
    assert sorted(one.host.name for one in found.ranks) == ["host0", "host1"]
    (link,) = found.links
    assert link.transport == "gloo"
    assert link.gb_s > 0


def test_a_job_of_srun_needs_an_address(refused, monkeypatch):
    for name, value in {"PROCID": "0", "NTASKS": "2", "LOCALID": "0", "STEP_NUM_TASKS": "2"}.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    told = "srun started this process as one of 2, which meet at an address: got None. Pass --address HOST:PORT"
    assert told in refused()
    assert "got 'host0'" in refused("--address", "host0")


def test_links_are_a_matrix_of_ranks():
    assert text(ranks=several(3), links=links(3)).splitlines()[-8:-2] == [
        "       |  rank 0 |           rank 1 |           rank 2",
        "-------+---------+------------------+-----------------",
        "rank 0 |       - | 1.00 (2.00 back) | 2.00 (3.00 back)",
        "rank 1 | 10.0 us |                - | 3.00 (4.00 back)",
        "rank 2 | 11.0 us |          12.0 us |                -",
        "by gloo: all pairs",
    ]


def test_of_many_links_the_slowest_are_shown():
    shown = text(ranks=several(20), links=links(20))
    assert "the slowest of 37 pairs of ranks, and the fastest" in shown
    assert "0-1   |" in shown
    assert "18-19 |" in shown


def test_links_of_several_kinds_are_named():
    mixed = [link._replace(transport="shared memory") if link.second == 1 else link for link in links(3)]
    shown = text(ranks=several(3), links=mixed)
    assert "by shared memory: ranks 0-1" in shown
    assert "by gloo: ranks 0-2, 1-2" in shown


def test_devices_are_a_table():
    device = DeviceFacts(name="H100", hardware="GPU-1", memory_bytes=2**36, capability="9.0", peers=(1, 2))
    assert "H100 | GPU-1 | 64.00 GiB |        9.0 |    1, 2" in text(ranks=several(1, devices=[device]))


def test_nothing_wrong_is_said():
    assert text().endswith("no known problem was found")
