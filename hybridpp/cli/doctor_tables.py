"""The report of ``hybridpp doctor`` as text."""

from collections.abc import Callable, Iterator, Sequence

from hybridpp.doctor import DoctorReport, RankFacts
from hybridpp.doctor.link_speed import LinkSpeed
from hybridpp.sizes import format_bytes
from hybridpp.text_table import TextTable

_OWN_ROW = ("hybridpp", "python", "torch")
# Larger tables do not fit a screen; the slowest pairs are told instead.
_MAX_MATRIX, _NUM_SLOWEST = 8, 5


def render_report(report: DoctorReport) -> list[str | TextTable]:
    """Text and tables, one below the other."""
    parts: list[str | TextTable] = [_versions(report.ranks[0]), "", _hosts(report.ranks), ""]
    if any(one.devices for one in report.ranks):
        parts += [_devices(report.ranks), ""]
    parts += [*_networks(report.ranks), f"backend of a job: {report.backend}, because {report.why}", ""]
    if report.links:
        parts += [*_links(report.links, len(report.ranks)), ""]
    for problem in report.problems:
        parts += [f"{problem.level}: {problem.what}", f"  {problem.way_out}"]
    if not report.problems:
        parts.append("no known problem was found")
    return parts


def _versions(first: RankFacts) -> TextTable:
    versions, builds = first.versions, first.builds
    built = ", ".join(f"{name} {builds[name] or 'none'}" for name in ("cuda", "nccl", "gloo"))
    rows = [
        ("hybridpp", f"{versions.get('hybridpp', 'not installed:')} {first.location}"),
        ("python", versions["python"]),
        ("torch", f"{versions['torch']} ({built}; {first.num_threads} threads)"),
        *((name, found) for name, found in versions.items() if name not in _OWN_ROW),
        *sorted(first.environment.items()),
    ]
    return TextTable(("what", "found"), rows, left=(0, 1))


def _hosts(ranks: Sequence[RankFacts]) -> TextTable:
    rows = []
    for first, num_ranks in _by_host(ranks):
        host = first.host
        quota = "" if host.cpu_quota is None else f" (at most {host.cpu_quota:g})"
        limit = "" if host.memory_limit_bytes is None else f" (at most {format_bytes(host.memory_limit_bytes)})"
        rows.append(
            (
                host.name,
                str(num_ranks),
                f"{host.cores}{quota}",
                format_bytes(host.memory_bytes) + limit,
                "none" if host.shm_bytes is None else format_bytes(host.shm_bytes),
                "no" if host.no_shared_memory else "yes",
                "unlimited" if host.open_files[0] < 0 else str(host.open_files[0]),
                host.huge_pages or "-",
                host.nvidia_driver or "none",
            )
        )
    titles = (
        "host",
        "ranks",
        "cores",
        "memory",
        "/dev/shm",
        "shares memory",
        "open files",
        "huge pages",
        "NVIDIA driver",
    )
    return TextTable(titles, rows)


def _devices(ranks: Sequence[RankFacts]) -> TextTable:
    rows = [
        (
            first.host.name,
            str(index),
            device.name,
            device.hardware,
            format_bytes(device.memory_bytes),
            device.capability,
            ", ".join(map(str, device.peers)) or "none",
        )
        for first, _ in _by_host(ranks)
        for index, device in enumerate(first.devices)
    ]
    return TextTable(("host", "device", "name", "UUID", "memory", "capability", "reaches"), rows, left=(0, 2, 3))


def _networks(ranks: Sequence[RankFacts]) -> Iterator[str]:
    for first, _ in _by_host(ranks):
        host = first.host
        found = ", ".join(f"{name} {address}".rstrip() for name, address in host.interfaces.items())
        named = " ".join(host.addresses) or "nothing"
        yield f"network of {host.name}: {found or 'no interface'}; the name resolves to {named}"


def _links(links: Sequence[LinkSpeed], num_ranks: int) -> Iterator[str | TextTable]:
    if num_ranks <= _MAX_MATRIX:
        yield "latency in us (below the diagonal), GB/s from the rank of the row to that of the column (above it)"
        yield _matrix(links, num_ranks)
    else:
        yield from _slowest(links)
    by_transport: dict[str, list[str]] = {}
    for link in links:
        by_transport.setdefault(link.transport, []).append(f"{link.first}-{link.second}")
    for transport, pairs in by_transport.items():
        named = "all pairs" if len(by_transport) == 1 else f"ranks {', '.join(pairs[:8])}{', …' * (len(pairs) > 8)}"
        yield f"by {transport}: {named}"


def _matrix(links: Sequence[LinkSpeed], num_ranks: int) -> TextTable:
    cells = [["-"] * num_ranks for _ in range(num_ranks)]
    for link in links:
        cells[link.first][link.second] = f"{link.gb_s:.2f} ({link.gb_s_back:.2f} back)"
        cells[link.second][link.first] = f"{link.latency_us:.1f} us"
    rows = [(f"rank {rank}", *row) for rank, row in enumerate(cells)]
    return TextTable(("", *(f"rank {rank}" for rank in range(num_ranks))), rows)


def _slowest(links: Sequence[LinkSpeed]) -> Iterator[str | TextTable]:
    worst: Callable[[LinkSpeed], float] = lambda link: min(link.gb_s, link.gb_s_back)  # noqa: E731
    ordered = sorted(links, key=worst)
    yield f"the slowest of {len(links)} pairs of ranks, and the fastest"
    shown = [*ordered[:_NUM_SLOWEST], ordered[-1]]
    rows = [
        (
            f"{link.first}-{link.second}",
            f"{link.latency_us:.1f}",
            f"{link.gb_s:.2f}",
            f"{link.gb_s_back:.2f}",
            link.transport,
        )
        for link in shown
    ]
    yield TextTable(("ranks", "us", "GB/s", "GB/s back", "by"), rows, left=(0, 4))


def _by_host(ranks: Sequence[RankFacts]) -> list[tuple[RankFacts, int]]:
    """The first rank of each host, and how many ranks the host has."""
    hosts = [one.host_id for one in ranks]
    return [(ranks[hosts.index(host)], hosts.count(host)) for host in dict.fromkeys(hosts)]
