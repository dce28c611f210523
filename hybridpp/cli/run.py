"""``hybridpp run``: torchrun with the settings that restarts and clean stops need, and with exit codes."""

import ast
import logging
import os
import re
import shutil
import signal
import socket
import sys
import tempfile
import threading
from argparse import Namespace
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import wraps
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple, NoReturn, cast

import typer
from torch.distributed import DistError
from torch.distributed import run as torchrun
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.multiprocessing.subprocess_handler import SubprocessHandler
from torch.distributed.elastic.rendezvous import RendezvousConnectionError, RendezvousError, RendezvousParameters
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import DEFAULT_PORT
from torch.distributed.elastic.rendezvous.utils import parse_rendezvous_endpoint

from hybridpp.checkpoint.remote_path import as_path
from hybridpp.cli.commands.run import RunArguments
from hybridpp.cli.endpoint import wait_for_endpoint
from hybridpp.cluster.exit_codes import FAILED, HANG, STOPPED
from hybridpp.cluster.host_address import address_towards, addresses_of, can_be_name, is_loopback, is_own
from hybridpp.cluster.launch import set_up_launcher
from hybridpp.cluster.launcher_notes import any_launched, has_begun, has_launched, has_saved, markers, num_ended
from hybridpp.cluster.stop_request import STOP_SIGNALS
from hybridpp.errors import ConfigError

# Ranks finish a step and save; what starts the job kills it earlier, if it is in a hurry.
_SHUTDOWN_S = 600
# How long torchrun waits for the other hosts at the start.
_MEETING_S = 600
# Torchrun's, of a job whose hosts have numbers.
_STATIC_PORT = 29500
_ON_EACH_HOST = "Start the job on each of them, with the same --nnodes and endpoint."
# For a handler, which is called at once unless native code waits.
_GRACE_S = 2.0


def run(arguments: RunArguments) -> None:
    """Run a script on several ranks; the exit code is one of ``hybridpp.cluster.exit_codes``.

    Raises:
        ConfigError: torchrun has no such options, or no rank could run the script.
    """
    parsed = _parse(arguments.arguments)
    _check_numbers(parsed)
    _check_script(parsed)
    with tempfile.TemporaryDirectory(prefix="hybridpp-run-", ignore_cleanup_errors=True) as folder:
        notes, logs = Path(folder, "notes"), Path(folder, "logs")
        notes.mkdir()
        # torchrun would leave an empty folder behind at every start.
        parsed.log_dir = parsed.log_dir or str(logs)
        several_hosts = _hosts(parsed)[1] > 1
        if not set_up_launcher(notes, several_hosts=several_hosts):
            _silence()
        _check_others(parsed)
        _check_meeting(parsed)
        awaited = _set_addresses(parsed)
        for name in STOP_SIGNALS:  # until torchrun has its own handlers
            signal.signal(getattr(signal, name), _raise_signal)
        code = _run(parsed, notes, awaited)
    raise typer.Exit(code)


def _parse(arguments: Sequence[str]) -> Namespace:
    parser = torchrun.get_args_parser()
    parser.prog = "hybridpp run"
    parser.description = (
        "Start a script on several ranks: torchrun, with settings that let a job be stopped and started again. All "
        "options are torchrun's."
    )
    parser.error = _refuse  # type: ignore[method-assign]
    parsed: Namespace = parser.parse_args(list(arguments))
    # Versions of torch before these options read them from the environment, or have fixed values.
    if getattr(parsed, "shutdown_timeout", 0) is None:
        parsed.shutdown_timeout = _SHUTDOWN_S
    if hasattr(parsed, "signals_to_handle"):
        handled = parsed.signals_to_handle.split(",")
        parsed.signals_to_handle = ",".join([*handled, *(name for name in STOP_SIGNALS if name not in handled)])
    return parsed


def _refuse(message: str) -> NoReturn:
    raise ConfigError(f"{message}. See hybridpp run -h.")


def _check_numbers(parsed: Namespace) -> None:
    """Refuse numbers of hosts and ranks that torchrun would refuse with a traceback."""
    try:
        hosts = _hosts(parsed)
        ranks = torchrun.determine_local_world_size(parsed.nproc_per_node)
    except (ValueError, RuntimeError) as error:
        _refuse(f"--nnodes {parsed.nnodes}, --nproc-per-node {parsed.nproc_per_node}: {str(error).rstrip('.')}")
    if not 1 <= hosts[0] <= hosts[1] or ranks < 1:
        _refuse(
            "a job needs at least one host and one rank on each: got "
            f"--nnodes {parsed.nnodes}, --nproc-per-node {parsed.nproc_per_node}"
        )
    if parsed.standalone and hosts[1] > 1:
        _refuse(f"--standalone starts a job on one host: got --nnodes {parsed.nnodes}. Leave out one of the two")


def _hosts(parsed: Namespace) -> tuple[int, int]:
    """The fewest and the most hosts of the job."""
    fewest, most = torchrun.parse_min_max_nnodes(parsed.nnodes)
    return fewest, most


def _endpoint(parsed: Namespace) -> str:
    """Where the hosts meet, as torchrun takes it from the options; empty: it chooses, or the backend is another one."""
    if parsed.standalone or parsed.rdzv_backend not in ("c10d", "static"):
        return ""
    if parsed.rdzv_backend == "c10d" or parsed.rdzv_endpoint:
        return str(parsed.rdzv_endpoint)
    if parsed.master_port is None and _hosts(parsed)[1] == 1:
        return ""
    return f"{parsed.master_addr}:{parsed.master_port or _STATIC_PORT}"


def _check_others(parsed: Namespace) -> None:
    """Refuse what else torchrun would refuse with a traceback. Before the launcher is set up, torchrun would warn."""
    try:
        torchrun.config_from_args(parsed)
        parse_rendezvous_endpoint(_endpoint(parsed), default_port=0)
    except (ValueError, AssertionError) as error:
        _refuse(str(error).rstrip("."))
    if not 0 < parsed.monitor_interval <= threading.TIMEOUT_MAX:
        _refuse(f"--monitor-interval must be above 0 seconds, and finite: got {parsed.monitor_interval:g}")
    for name in getattr(parsed, "signals_to_handle", "").split(","):
        if name and (name in ("SIGKILL", "SIGSTOP") or name not in signal.Signals.__members__):
            _refuse(f"--signals-to-handle are names of signals that a process can catch: got {name}")


def _check_meeting(parsed: Namespace) -> None:
    """Refuse addresses at which nobody can ever be met: torchrun would wait, and say nothing."""
    endpoint, most = _endpoint(parsed), _hosts(parsed)[1]
    local = parsed.local_addr
    if local and not (is_own(local) if most == 1 else can_be_name(local)):
        _refuse(f"--local-addr is a name or an address of this host: got {local}. Leave it out, or correct it")
    if not endpoint:
        return
    host, port = parse_rendezvous_endpoint(endpoint, default_port=DEFAULT_PORT)
    if not can_be_name(host):
        _refuse(f"hosts meet at a name or an address of one of them: got the endpoint {endpoint}")
    is_static = parsed.rdzv_backend == "static"
    if is_static and not 0 <= parsed.node_rank < most:
        _refuse(f"--node-rank is 0 to {most - 1} with --nnodes {parsed.nnodes}: got {parsed.node_rank}")
    if most > 1 and port == 0:
        _refuse(f"hosts meet at a port that all know: got the endpoint {endpoint}. Use one from 1 to 65535")
    if (most == 1 or (is_static and parsed.node_rank == 0)) and not addresses_of(host):
        _refuse(f"this host is to be the endpoint {endpoint}, and knows no address of {host}. Correct the name")
    if most == 1 and is_static and not is_own(host):
        _refuse(f"a job of one host meets at an address of this host: got {endpoint}. Correct it, or leave it out")


class _Awaited(NamedTuple):
    """An endpoint on another host, and how long to wait for it."""

    host: str
    port: int
    patience_s: float


def _set_addresses(parsed: Namespace) -> _Awaited | None:
    """Let the hosts find each other whatever each calls itself; returns the endpoint that is to be waited for.

    Torchrun tells the others its host's own name. On the host itself it looks that up, too, to see whether it is the
    endpoint, and it misses addresses of other networks.
    """
    endpoint = _endpoint(parsed)
    if not endpoint:
        return None
    if parsed.rdzv_backend == "static":
        host, port = parse_rendezvous_endpoint(endpoint, default_port=_STATIC_PORT)
        return _Awaited(host, port, _patience_s(parsed)) if parsed.node_rank > 0 else None
    if "read_timeout" not in parsed.rdzv_conf:
        # After a cut, launchers wait for each other as long as at the start; after torch's 60 s they end.
        _add_conf(parsed, f"read_timeout={_MEETING_S}")
    host, port = parse_rendezvous_endpoint(parsed.rdzv_endpoint, default_port=DEFAULT_PORT)
    reached_from = address_towards(host)
    if parsed.local_addr is None and reached_from:
        # To the endpoint's host, the way may be a loopback address; the others know it as the endpoint.
        parsed.local_addr = host if is_loopback(reached_from) else reached_from
    own_name = socket.gethostname()
    of_endpoint, of_own_name = addresses_of(host), addresses_of(own_name)
    is_here = host == own_name or is_own(host)
    # Where torchrun finds it, it also gives it up if another launcher of this host has the port.
    is_missed = not of_own_name or (is_here and not of_own_name & of_endpoint)
    if "is_host" not in parsed.rdzv_conf and not any(map(is_loopback, of_endpoint)) and is_missed:
        _add_conf(parsed, f"is_host={str(is_here).lower()}")
    try:
        chosen = _chosen(parsed)
        # Torchrun goes by the host's name, whose address may be one that only others see (of a cloud).
        is_awaited = not chosen.get_as_bool("is_host", is_here or bool(of_own_name & of_endpoint))
        return _Awaited(host, port, chosen.get_as_int("read_timeout") or _MEETING_S) if is_awaited else None
    except ValueError as error:
        _refuse(str(error).rstrip("."))


def _chosen(parsed: Namespace) -> RendezvousParameters:
    conf = dict(one.strip().partition("=")[::2] for one in parsed.rdzv_conf.split(",") if one.strip())
    return RendezvousParameters(parsed.rdzv_backend, parsed.rdzv_endpoint, "", 1, 1, **conf)


def _patience_s(parsed: Namespace) -> int:
    """How long torchrun waits for the other hosts."""
    name, default_s = ("timeout", 900) if parsed.rdzv_backend == "static" else ("join_timeout", _MEETING_S)
    try:
        patience_s = _chosen(parsed).get_as_int(name, default_s)
    except ValueError as error:
        _refuse(str(error).rstrip("."))
    if patience_s is None or patience_s <= 0:
        _refuse(f"--rdzv-conf {name} must be above 0 seconds: got {patience_s}")
    return patience_s


def _add_conf(parsed: Namespace, text: str) -> None:
    parsed.rdzv_conf = ",".join(filter(None, [parsed.rdzv_conf, text]))


def _check_script(parsed: Namespace) -> None:
    """Refuse a script that no rank could run: each of them would say why."""
    if parsed.module or parsed.no_python:
        return
    path = Path(parsed.training_script)
    if path.is_char_device() or path.is_block_device():
        raise ConfigError(f"{path} is a device. Pass the path of a script, and its arguments after it.")
    try:
        ast.parse(path.read_bytes(), str(path))
    except OSError as error:
        raise ConfigError(
            f"{path} cannot be read: {error.strerror}. Pass the path of a script, and its arguments after it."
        ) from error
    except (SyntaxError, ValueError) as error:  # ValueError: null bytes, in some versions of Python
        line = getattr(error, "lineno", None)
        where = f"{path}, line {line}" if line else str(path)
        raise ConfigError(f"{where}: {getattr(error, 'msg', error)}. Correct the script.") from error


def _run(parsed: Namespace, notes: Path, awaited: _Awaited | None) -> int:
    if awaited is not None or _hosts(parsed)[1] > 1:
        _say_waits(parsed, awaited)
    try:
        if awaited is not None and not wait_for_endpoint(*awaited):
            _say(
                f"nobody listens at the endpoint {_endpoint(parsed)} after {awaited.patience_s:g} s. Start the job "
                "on its host, too, with the same endpoint, and let firewalls pass that port."
            )
            return FAILED
        with gentle_ends(notes), _signals_end_native_waits(notes.parent):
            torchrun.run(parsed)  # type: ignore[no-untyped-call]  # torch
    except ChildFailedError as error:
        return _failed(error)
    except (RendezvousConnectionError, DistError) as error:  # its native stack may follow
        _say(f"the hosts of the job did not meet, or have lost each other: {_named(error)}. {_ON_EACH_HOST}")
        return FAILED
    except RendezvousError as error:
        _say(f"the hosts of the job did not meet: {_named(error)}. {_ON_EACH_HOST}")
        return FAILED
    except (ValueError, KeyError, AssertionError, ImportError) as error:  # of names that it looks up when it starts
        _refuse(f"torchrun takes no such option: {_named(error)}")
    except SignalException as received:
        return _stopped(notes, torchrun.determine_local_world_size(parsed.nproc_per_node), received.sigval)
    return _say_stopped("the job") if _has_saved(notes) else 0


def _named(error: Exception) -> str:
    first_line = str(error).partition("\n")[0].rstrip(".?")
    return ": ".join(filter(None, [type(error).__name__, first_line]))


@contextmanager
def _signals_end_native_waits(folder: Path) -> Iterator[None]:
    """Let signals end this process also where torch waits for other hosts in native code, which calls no handlers.

    Once ranks are started, torchrun's handlers are there, and nothing is done here.

    Args:
        folder: removed then.
    """
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    before, has_left = signal.set_wakeup_fd(writing, warn_on_full_buffer=False), threading.Event()

    def watch() -> None:
        while number := os.read(reading, 1):
            received, handled = number[0], (_raise_signal, signal.default_int_handler)
            if not has_left.wait(_GRACE_S) and signal.getsignal(received) in handled:
                name = signal.Signals(received).name
                _say(f"{name}: the job was stopped before its first step. Start it again.")
                shutil.rmtree(folder, ignore_errors=True)
                os._exit(128 + received)

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    try:
        yield
    finally:
        has_left.set()
        signal.set_wakeup_fd(before)
        os.close(writing)
        watcher.join()
        os.close(reading)


def _say_waits(parsed: Namespace, awaited: _Awaited | None) -> None:
    fewest, most = _hosts(parsed)
    hosts = f"{most} host{'s' if most > 1 else ''}" if fewest == most else f"{fewest} to {most} hosts"
    patience_s = _patience_s(parsed) if awaited is None else awaited.patience_s
    where = _endpoint(parsed) or f"the backend {parsed.rdzv_backend}"
    _say(f"{hosts} of the job are to meet at {where}: waits for at most {patience_s:g} s.")


@contextmanager
def gentle_ends(notes: Path) -> Iterator[None]:
    """Let torchrun, inside, end ranks without words that help nobody.

    A rank may have ended just now: torchrun would leave the others, with a ProcessLookupError. And a rank that has not
    called ``launch``, as it imports its script, would print a stack at Ctrl-C, each of them its own.

    Args:
        notes: of the ranks.
    """
    close, handler_class = SubprocessHandler.close, cast(Any, SubprocessHandler)

    @wraps(close)
    def close_gently(handler: SubprocessHandler, death_sig: signal.Signals | None = None) -> None:
        if death_sig == signal.SIGINT and not has_launched(notes, handler.proc.pid):
            death_sig = signal.SIGTERM
        with suppress(ProcessLookupError):
            close(handler, death_sig)

    handler_class.close = close_gently
    try:
        yield
    finally:
        handler_class.close = close


def _failed(error: ChildFailedError) -> int:
    failures = error.failures
    for rank, failure in failures.items():
        if failure.exitcode == HANG:
            _say(f"rank {rank} ended a job that made no progress. Its report is above.")
            return HANG
    killed = {rank: one for rank, one in failures.items() if one.exitcode < 0 and one.exitcode != -signal.SIGTERM}
    if killed:
        rank, failure = next(iter(killed.items()))
        _say(
            f"rank {rank} was ended by {failure.signal_name()}. Where nobody sent that, the host may have been out of "
            "memory (SIGKILL), or native code has failed."
        )
        return FAILED
    rank, failure = error.get_first_failure()
    _say(f"rank {rank} failed, with exit code {failure.exitcode}.")
    return FAILED


def _stopped(notes: Path, num_ranks: int, received: signal.Signals) -> int:
    name = signal.Signals(received).name
    if _has_saved(notes):
        return _say_stopped(f"{name}: the job")
    if num_ended(notes) == num_ranks:
        return 0
    is_stop = name in STOP_SIGNALS
    # Ranks that have called launch say themselves that they were interrupted.
    if not has_begun(notes) and (is_stop or not any_launched(notes)):
        _say(f"{name}: the job was stopped before its first step. Start it again.")
    if not is_stop:
        return 128 + received
    if not has_begun(notes):
        return STOPPED
    _say(
        f"{name}: the job was stopped, and its last steps are lost: no checkpoint was saved. The script calls "
        "booster.save where booster.interrupted is True."
    )
    return FAILED


def _say_stopped(what: str) -> int:
    _say(f"{what} was stopped, and has saved a checkpoint. Start it again to go on.")
    return STOPPED


def _has_saved(notes: Path) -> bool:
    return has_saved(notes) or any(as_path(marker).is_file() for marker in markers(notes))


def _say(text: str) -> None:
    sys.stderr.write(f"hybridpp run: {text}\n")


class _RestartNotice(logging.Handler):
    """Says in a line that the ranks are started again, and why, from what torchrun logs of it."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self._reason = "a host has failed, left or joined"

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage()
        if failed := re.match(r"failed \(exitcode: (-?\d+)\) local_rank: (\d+)", text):
            code, local_rank = map(int, failed.groups())
            how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
            self._reason = f"local rank {local_rank} {how}"
        if "will restart worker group" in text:
            left = re.search(r"\d+/\d+ attempts left", text)
            _say(f"{self._reason}. The job starts again{f' ({left.group()})' if left else ''}.")


def _silence() -> None:
    """Let torchrun's own log not repeat what ranks and this command say."""
    notice = _RestartNotice()
    for name in ("torch.distributed.elastic", "torch.distributed.run"):
        for known in (name, *(known for known in logging.root.manager.loggerDict if known.startswith(f"{name}."))):
            logger = logging.getLogger(known)
            logger.handlers, logger.propagate = [notice], False
            logger.setLevel(logging.INFO)


def _raise_signal(number: int, frame: FrameType | None) -> NoReturn:
    raise SignalException(f"got signal {number}", signal.Signals(number))
