"""Facts of ranks without a problem, for tests to change."""

from dataclasses import replace

from hybridpp.doctor import RankFacts
from hybridpp.doctor.host import HostFacts
from hybridpp.doctor.packages import OLDEST

HOST = HostFacts(
    name="host0",
    addresses=("10.0.0.1",),
    interfaces={"lo": "127.0.0.1", "eth0": "10.0.0.1"},
    system="Linux 6.1 x86_64",
    cores=8,
    cpu_quota=None,
    memory_bytes=2**36,
    memory_limit_bytes=None,
    shm_bytes=2**35,
    shm_free_bytes=2**35,
    open_files=(65536, 1048576),
    file_bytes=-1,
    huge_pages="madvise",
    no_shared_memory="",
    nvidia_driver=None,
)
FACTS = RankFacts(
    rank=0,
    local_rank=0,
    machine="boot0",
    hardware="",
    versions={"python": "3.11.7", "hybridpp": "0.2.0", **OLDEST},
    builds={"cuda": "", "nccl": "", "gloo": "built in"},
    location="/site/hybridpp",
    host=HOST,
    devices=[],
    no_device="",
    torchvision="",
    num_threads=1,
    environment={"OMP_NUM_THREADS": "1", "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"},
)


def facts(host=None, **changes):
    """The same with other values, of the rank and of its host."""
    return replace(FACTS, host=replace(HOST, **(host or {})), **changes)


def several(num_ranks, **changes):
    """Of ranks on one host."""
    return [facts(rank=rank, local_rank=rank, **changes) for rank in range(num_ranks)]


def told(problems):
    """(level, what) of each."""
    return [(problem.level, problem.what) for problem in problems]
