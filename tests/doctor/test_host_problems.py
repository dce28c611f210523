import pytest
from doctor.facts import FACTS, facts, several, told

from hybridpp.doctor.host_problems import host_problems

GPU_HOST = {"nvidia_driver": "580.1"}


def test_a_host_without_a_problem_has_none():
    assert list(host_problems([FACTS])) == []
    assert list(host_problems(several(8))) == []


@pytest.mark.parametrize(
    ("changes", "level", "text"),
    [
        ({"host": {"shm_bytes": 2**26}}, "warning", "/dev/shm has 64.00 MiB, and workers of data loaders"),
        ({"host": {"shm_free_bytes": 2**20}}, "warning", "/dev/shm has 1.00 MiB left"),
        ({"host": {"open_files": (256, 4096)}}, "warning", "a process may open 256 files"),
        ({"host": {"no_shared_memory": "no memfd."}}, "hint", "ranks of this host cannot communicate through shared"),
        ({"host": {"file_bytes": 2**30}}, "warning", "a process may write files of 1.00 GiB"),
        ({"host": {"addresses": ()}}, "hint", "the name of this host, host0, does not resolve"),
        (
            {"environment": {**FACTS.environment, "GLOO_SOCKET_IFNAME": "ib0"}},
            "error",
            "GLOO_SOCKET_IFNAME names an interface of this host: got ib0, and there are lo, eth0.",
        ),
        (
            {"environment": {**FACTS.environment, "NCCL_SOCKET_IFNAME": "ib,eth"}},
            "error",
            "NCCL_SOCKET_IFNAME names an interface of this host: got ib, and there are lo, eth0.",
        ),
        ({"environment": {**FACTS.environment, "HYBRIDPP_SHARED_MEMORY": "0"}}, "hint", "HYBRIDPP_SHARED_MEMORY=0"),
        ({"environment": {**FACTS.environment, "https_proxy": "set"}}, "hint", "https_proxy is set, and no_proxy"),
        ({"host": {"huge_pages": "never"}}, "hint", "transparent huge pages are off (never)"),
        ({"environment": {}}, "hint", "glibc gives memory of freed activations back"),
    ],
    ids=lambda value: value[:30] if isinstance(value, str) else None,
)
def test_each_problem_is_told_once(changes, level, text):
    (found,) = host_problems([facts(**changes)])
    assert found.level == level
    assert found.what.startswith(text)
    assert found.way_out


@pytest.mark.parametrize(
    "environment",
    [
        {"NCCL_SOCKET_IFNAME": "^docker"},
        {"NCCL_SOCKET_IFNAME": "eth"},
        {"GLOO_SOCKET_IFNAME": "lo,eth0"},
        {"https_proxy": "set", "no_proxy": "localhost,.cluster"},
    ],
    ids=str,
)
def test_settings_that_fit_are_no_problem(environment):
    assert list(host_problems([facts(environment={**FACTS.environment, **environment})])) == []


def test_a_limit_of_files_tells_how_far_it_can_be_raised():
    (found,) = host_problems([facts(host={"open_files": (256, 4096)})])
    assert found.way_out == "Run ulimit -n 4096 before the job."
    (found,) = host_problems([facts(host={"open_files": (256, -1)})])
    assert found.way_out == "Run ulimit -n unlimited before the job."
    (found,) = host_problems([facts(host={"open_files": (256, 512)})])
    assert found.way_out == "Let the host allow more than 512."


def test_threads_of_several_ranks_that_exceed_the_cores_are_told():
    unset = {name: value for name, value in FACTS.environment.items() if name != "OMP_NUM_THREADS"}
    (found,) = host_problems(several(4, num_threads=8, environment=unset))
    assert found.what == ("4 ranks of host host0 compute with 8 threads each on 8 cores: OMP_NUM_THREADS is not set.")
    assert found.way_out == "Set OMP_NUM_THREADS=2 for every rank; torchrun and hybridpp run set 1."
    # A single rank may use all cores.
    assert list(host_problems(several(1, num_threads=8, environment=unset))) == []


def test_more_ranks_than_cores_are_told_once_and_a_container_has_fewer():
    assert told(host_problems(several(9))) == [
        ("warning", "host host0 has 9 ranks and 8 cores: a rank that waits takes time from others.")
    ]
    (found,) = host_problems(several(4, host={"cpu_quota": 1.5}))
    assert found.what.startswith("host host0 has 4 ranks and 2 cores")


def test_where_there_are_devices_the_memory_of_the_host_matters_less():
    device = object()
    assert list(host_problems([facts(devices=[device], environment={}, host={"huge_pages": "never"})])) == []
