"""Problems of a host, and of the settings of the processes on it."""

from collections.abc import Iterator, Sequence

from hybridpp.doctor.problem import Problem
from hybridpp.doctor.rank_facts import RankFacts
from hybridpp.sizes import format_bytes

_MIN_SHM = 2**30
_MIN_OPEN_FILES = 1024
# A file of a checkpoint has the weights, masters and moments of a rank.
_LARGE_FILE = 2**36


def host_problems(ranks: Sequence[RankFacts]) -> Iterator[Problem]:
    """Of one host, from the facts of all ranks on it; the first stands for what they have in common."""
    yield from _thread_problems(ranks)
    yield from _limit_problems(ranks[0])
    yield from _name_problems(ranks[0])
    yield from _setting_problems(ranks[0])


def _thread_problems(ranks: Sequence[RankFacts]) -> Iterator[Problem]:
    first, num_ranks = ranks[0], len(ranks)
    host = first.host
    cores = host.cores if host.cpu_quota is None else max(1, min(host.cores, round(host.cpu_quota)))
    if num_ranks > cores:
        yield Problem(
            level="warning",
            what=f"host {host.name} has {num_ranks} ranks and {cores} cores: a rank that waits takes time from others.",
            way_out=f"Start at most {cores} ranks there, or set HYBRIDPP_SHARED_MEMORY=0, whose waits do not spin.",
        )
    elif num_ranks > 1 and num_ranks * first.num_threads > cores:
        value = first.environment.get("OMP_NUM_THREADS")
        yield Problem(
            level="warning",
            what=f"{num_ranks} ranks of host {host.name} compute with {first.num_threads} threads each on {cores} "
            f"cores: OMP_NUM_THREADS is {'not set' if value is None else value}.",
            way_out=f"Set OMP_NUM_THREADS={cores // num_ranks} for every rank; torchrun and hybridpp run set 1.",
        )


def _limit_problems(facts: RankFacts) -> Iterator[Problem]:
    host = facts.host
    if host.shm_bytes is not None and host.shm_bytes < _MIN_SHM:
        yield Problem(
            level="warning",
            what=f"/dev/shm has {format_bytes(host.shm_bytes)}, and workers of data loaders pass batches through it.",
            way_out="Start the container with --shm-size=8g or --ipc=host; in Kubernetes mount an emptyDir of medium "
            "Memory there.",
        )
    elif host.shm_free_bytes is not None and host.shm_free_bytes < _MIN_SHM:
        yield Problem(
            level="warning",
            what=f"/dev/shm has {format_bytes(host.shm_free_bytes)} left, and workers of data loaders pass batches "
            "through it.",
            way_out="Remove what ended processes have left there (ls -l /dev/shm).",
        )
    soft, hard = host.open_files
    if 0 <= soft < _MIN_OPEN_FILES:
        way_out = f"Run ulimit -n {hard if hard >= _MIN_OPEN_FILES else 'unlimited'} before the job."
        yield Problem(
            level="warning",
            what=f"a process may open {soft} files, and groups of ranks, data loaders and checkpoints take hundreds.",
            way_out=way_out if hard < 0 or hard >= _MIN_OPEN_FILES else f"Let the host allow more than {hard}.",
        )
    if host.no_shared_memory:
        yield Problem(
            level="hint",
            what=f"ranks of this host cannot communicate through shared memory: {host.no_shared_memory.rstrip('.')}.",
            way_out="They use gloo, whose results are the same.",
        )
    if 0 <= host.file_bytes < _LARGE_FILE:
        yield Problem(
            level="warning",
            what=f"a process may write files of {format_bytes(host.file_bytes)}, and files of checkpoints are larger.",
            way_out="Run ulimit -f unlimited before the job.",
        )


def _name_problems(facts: RankFacts) -> Iterator[Problem]:
    host, environment = facts.host, facts.environment
    if not host.addresses and "GLOO_SOCKET_IFNAME" not in environment:
        yield Problem(
            level="hint",
            what=f"the name of this host, {host.name}, does not resolve: with several hosts, plain torchrun tells them "
            "this name, and where another library joins the job, gloo takes the loopback address.",
            way_out="Use hybridpp run; or pass --local-addr to torchrun, and set GLOO_SOCKET_IFNAME.",
        )
    for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        value = environment.get(variable, "")
        wanted = [] if value.startswith("^") else [one.strip("=") for one in value.split(",") if one]
        # NCCL's are prefixes.
        unknown = [one for one in wanted if not any(_is_meant(one, name, variable) for name in host.interfaces)]
        if unknown:
            yield Problem(
                level="error",
                what=f"{variable} names an interface of this host: got {', '.join(unknown)}, and there are "
                f"{', '.join(host.interfaces)}.",
                way_out="Name one of these, or unset it.",
            )


def _is_meant(wanted: str, name: str, variable: str) -> bool:
    return name.startswith(wanted) if variable.startswith("NCCL") else name == wanted


def _setting_problems(facts: RankFacts) -> Iterator[Problem]:
    environment = facts.environment
    value = environment.get("HYBRIDPP_SHARED_MEMORY", "1")
    if value == "0":
        yield Problem(
            level="hint",
            what="HYBRIDPP_SHARED_MEMORY=0: ranks of this host communicate by gloo.",
            way_out="Unset it where nothing speaks against shared memory.",
        )
    proxies = [name for name in ("http_proxy", "https_proxy", "all_proxy") if name in environment]
    if proxies and not {"localhost", "127.0.0.1", "*"} & set(environment.get("no_proxy", "").split(",")):
        yield Problem(
            level="hint",
            what=f"{', '.join(proxies)} {'is' if len(proxies) == 1 else 'are'} set, and no_proxy leaves out this host: "
            "downloads use the proxy, and so does Ray between its processes. Ranks of a job do not.",
            way_out="Set no_proxy=localhost,127.0.0.1 and the names of the hosts.",
        )
    if facts.devices:
        return
    if facts.host.huge_pages == "never":
        yield Problem(
            level="hint",
            what="transparent huge pages are off (never): large tensors take more page faults.",
            way_out="Write madvise to /sys/kernel/mm/transparent_hugepage/enabled.",
        )
    if "GLIBC_TUNABLES" not in environment and "LD_PRELOAD" not in environment:
        yield Problem(
            level="hint",
            what="glibc gives memory of freed activations back to the kernel, and asks for it again in every step.",
            way_out=(
                "Start ranks with GLIBC_TUNABLES=glibc.malloc.hugetlb=1:glibc.malloc.trim_threshold=4000000000:"
                "glibc.malloc.mmap_threshold=4000000000."
            ),
        )
