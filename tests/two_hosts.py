"""Two hosts in one machine: namespaces with an address, a name, processes and files of their own, joined by a cable.

Each host is a process that waits, in namespaces of the network, the host's name, mounts and processes; when it ends, or
this process does, all processes of the host are killed, and its devices are gone. No privileges are needed where users
may make namespaces.
"""

import os
import re
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from mounts import CLONE_NEWNS, CLONE_NEWUSER, checked, libc
from support import ROOT

CLONE_NEWNET, CLONE_NEWUTS, CLONE_NEWPID = 0x40000000, 0x04000000, 0x20000000
PR_SET_PDEATHSIG = 1
_TOOLS = ("unshare", "nsenter", "ip")
# Of the user (-U, in which this one is root), network, name, mounts and processes.
_NAMESPACES = ("-n", "-u", "-m", "-p")


class NoHostsError(Exception):
    """This machine does not let this user make hosts."""


@dataclass
class Host:
    """A host.

    Attributes:
        name: of it.
        address: in the network of both hosts.
        first: its first process.
        pid: number of that, as others see it.
    """

    name: str
    address: str
    first: subprocess.Popen[bytes]
    pid: int

    def command(self, *arguments: object) -> list[str]:
        """A command line that runs another one on the host."""
        enter = ["nsenter", "-t", str(self.pid), "-U", "--preserve-credentials", *_NAMESPACES]
        return [*enter, f"--wd={os.getcwd()}", *map(str, arguments)]

    def run(self, *arguments: object) -> str:
        """Run a command on the host; what it prints."""
        return _do(self.command(*arguments))

    def start(self, *arguments: object, env: Mapping[str, str] | None = None, **options: Any) -> subprocess.Popen[str]:
        """Start Python on the host, from a checkout that is not installed; its output is read as text."""
        path = os.pathsep.join(str(ROOT / folder) for folder in (".", "plugins", "tests"))
        variables = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", **(env or {})}
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, **options}
        return subprocess.Popen(self.command(*arguments), env=variables, **pipes)

    def enter(self) -> None:
        """Move this process to the host: a forked child of one thread. It goes on as a child of its own."""
        user = os.open(f"/proc/{self.pid}/ns/user", os.O_RDONLY)
        others = {CLONE_NEWPID: "pid", CLONE_NEWNET: "net", CLONE_NEWUTS: "uts", CLONE_NEWNS: "mnt"}
        files = {kind: os.open(f"/proc/{self.pid}/ns/{name}", os.O_RDONLY) for kind, name in others.items()}
        checked(libc().setns(user, CLONE_NEWUSER))
        for kind, file in files.items():
            checked(libc().setns(file, kind))
        for file in (user, *files.values()):
            os.close(file)
        # A process keeps its own number; its children have numbers of the host.
        child = os.fork()
        if child:
            os._exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) & 0xFF)
        checked(libc().prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0))

    def set_link(self, *, up: bool) -> None:
        """Plug the host's cable in, or out."""
        self.run(*_words(f"ip link set cable {'up' if up else 'down'}"))

    def slow_down(self, mbit_s: float, queue_kb: int | None = None) -> None:
        """Let the host send no faster than this; the kernel need not have more than ``tbf``.

        What does not fit into a queue of ``queue_kb`` is lost; None: the queue holds 10 s.
        """
        queue = ("latency", "10s") if queue_kb is None else ("limit", f"{queue_kb}kb")
        self.run(*_words("tc qdisc replace dev cable root tbf burst 16kb"), *queue, "rate", f"{mbit_s}mbit")

    def num_lost(self) -> int:
        """Packets that :meth:`slow_down` has lost."""
        return sum(map(int, re.findall(r"dropped (\d+)", self.run(*_words("tc -s qdisc show dev cable")))))

    def set_names(self, names: Mapping[str, str]) -> None:
        """What the host takes for the addresses of names: its ``/etc/hosts``."""
        lines = "".join(f"{address} {name}\n" for name, address in names.items())
        self.run("sh", "-c", 'printf %s "$0" > /etc/hosts', lines)

    def end(self) -> None:
        """The host goes down, with all its processes; its peer is not told."""
        self.first.kill()
        self.first.communicate()


@contextmanager
def two_hosts() -> Iterator[tuple[Host, Host]]:
    """Two hosts with the addresses 10.77.0.1 and 10.77.0.2, which know each other's name.

    Raises:
        NoHostsError: this machine lets this user make none.
    """
    missing = [tool for tool in _TOOLS if shutil.which(tool) is None]
    if missing:
        raise NoHostsError(f"no command {', '.join(missing)}")
    with ExitStack() as hosts:
        first = _boot("host0", "10.77.0.1", ["unshare", "-U", "-r", *_NAMESPACES])
        hosts.callback(first.end)
        enter = ["nsenter", "-t", str(first.pid), "-U", "--preserve-credentials"]
        second = _boot("host1", "10.77.0.2", [*enter, "unshare", *_NAMESPACES])
        hosts.callback(second.end)
        both = first, second
        # Not in the mounts of the host, whose /proc has other numbers.
        _do([*enter, "-n", *_words("ip link add cable type veth peer name cable netns"), str(second.pid)])
        for host in both:
            host.run(*_words(f"ip address add {host.address}/24 dev cable"))
            host.run(*_words("ip link set lo up"))
            host.set_link(up=True)
            with tempfile.NamedTemporaryFile() as file:
                # It stays as long as the mount.
                host.run("mount", "--bind", file.name, "/etc/hosts")
            host.set_names({"localhost": "127.0.0.1", **{each.name: each.address for each in both}})
        yield both


def on_hosts(hosts: tuple[Host, Host], address: str = "", ranks_per_host: int = 1) -> dict[str, Any]:
    """What :func:`processes.run_ranks` needs to start as many ranks on each host; rank 0 is known by ``address``."""

    def move(rank: int) -> int:
        hosts[rank // ranks_per_host].enter()
        return rank % ranks_per_host

    return {"address": address or hosts[0].address, "move": move}


def _boot(name: str, address: str, command: list[str]) -> Host:
    # The shell is what takes care of processes that others leave; it ends with the pipe, so with this process.
    shell = [*command, "--fork", "--kill-child", "--mount-proc", "sh", "-c", 'hostname "$0"; echo; cat; :', name]
    first = subprocess.Popen(shell, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert first.stdout is not None
    assert first.stderr is not None
    if not first.stdout.readline():
        raise NoHostsError(first.stderr.read().decode().strip())
    # From unshare, which nsenter becomes, to the shell that it forked.
    children = Path(f"/proc/{first.pid}/task/{first.pid}/children").read_text().split()
    return Host(name, address, first, int(children[0]))


def _words(command: str) -> list[str]:
    return command.split()


def _do(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise NoHostsError(f"{' '.join(command)}: {done.stderr.strip()}")
    return done.stdout


@contextmanager
def hosts_or_skip() -> Iterator[tuple[Host, Host]]:
    """Two hosts; skips the test where there can be none."""
    with ExitStack() as stack:
        try:
            both = stack.enter_context(two_hosts())
        except NoHostsError as error:
            pytest.skip(f"this machine makes no network namespaces: {error}")
        yield both
