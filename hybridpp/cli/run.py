"""``hybridpp run``: torchrun with the settings that restarts and clean stops need, and with exit codes."""

import ast
import logging
import re
import signal
import socket
import sys
import tempfile
from argparse import Namespace
from collections.abc import Sequence
from contextlib import suppress
from functools import wraps
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple, NoReturn

import typer
from torch.distributed import run as torchrun
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.multiprocessing.subprocess_handler import SubprocessHandler
from torch.distributed.elastic.rendezvous import RendezvousError, RendezvousParameters
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import DEFAULT_PORT
from torch.distributed.elastic.rendezvous.utils import parse_rendezvous_endpoint

from hybridpp.checkpoint.remote_path import as_path
from hybridpp.cli.commands.run import RunArguments
from hybridpp.cli.endpoint import wait_for_endpoint
from hybridpp.cluster.exit_codes import FAILED, HANG, STOPPED
from hybridpp.cluster.host_address import address_towards, addresses_of, is_loopback, is_own
from hybridpp.cluster.launch import set_up_launcher
from hybridpp.cluster.launcher_notes import has_begun, markers, num_ended
from hybridpp.cluster.stop_request import STOP_SIGNALS
from hybridpp.errors import ConfigError

# Ranks finish a step and save; what starts the job kills it earlier, if it is in a hurry.
_SHUTDOWN_S = 600
# How long torchrun waits for the other hosts at the start.
_MEETING_S = 600


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
        several_hosts = torchrun.parse_min_max_nnodes(parsed.nnodes)[1] > 1
        if not set_up_launcher(notes, several_hosts=several_hosts):
            _silence()
        _check_others(parsed)
        awaited = _set_addresses(parsed) if several_hosts else None
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
        hosts = torchrun.parse_min_max_nnodes(parsed.nnodes)
        ranks = torchrun.determine_local_world_size(parsed.nproc_per_node)
    except (ValueError, RuntimeError) as error:
        _refuse(f"--nnodes {parsed.nnodes}, --nproc-per-node {parsed.nproc_per_node}: {str(error).rstrip('.')}")
    if not 1 <= hosts[0] <= hosts[1] or ranks < 1:
        _refuse(
            "a job needs at least one host and one rank on each: got "
            f"--nnodes {parsed.nnodes}, --nproc-per-node {parsed.nproc_per_node}"
        )


def _check_others(parsed: Namespace) -> None:
    """Refuse what else torchrun would refuse with a traceback. Before the launcher is set up, torchrun would warn."""
    try:
        torchrun.config_from_args(parsed)
        parse_rendezvous_endpoint(parsed.rdzv_endpoint, default_port=0)
    except (ValueError, AssertionError) as error:
        _refuse(str(error).rstrip("."))
    if parsed.monitor_interval <= 0:
        _refuse(f"--monitor-interval must be above 0 seconds: got {parsed.monitor_interval:g}")


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
    if parsed.rdzv_backend != "c10d" or not parsed.rdzv_endpoint:
        return None
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
    conf = dict(one.strip().partition("=")[::2] for one in parsed.rdzv_conf.split(",") if one.strip())
    try:
        chosen = RendezvousParameters("c10d", parsed.rdzv_endpoint, "", 1, 1, **conf)
        # Torchrun goes by the host's name, whose address may be one that only others see (of a cloud).
        is_awaited = not chosen.get_as_bool("is_host", is_here or bool(of_own_name & of_endpoint))
        return _Awaited(host, port, chosen.get_as_int("read_timeout") or _MEETING_S) if is_awaited else None
    except ValueError as error:
        _refuse(str(error).rstrip("."))


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
    try:
        if awaited is not None and not wait_for_endpoint(*awaited):
            _say(
                f"nobody listens at the endpoint {parsed.rdzv_endpoint} after {awaited.patience_s:g} s. Start the job "
                "on its host, too, with the same --rdzv-endpoint, and let firewalls pass that port."
            )
            return FAILED
        allow_ended_ranks()
        torchrun.run(parsed)  # type: ignore[no-untyped-call]  # torch
    except ChildFailedError as error:
        return _failed(error)
    except RendezvousError as error:
        _say(f"the hosts of the job did not meet: {type(error).__name__}: {error}")
        return FAILED
    except (ValueError, KeyError, AssertionError) as error:  # of names that torchrun looks up when it starts
        _refuse(f"torchrun takes no such option: {type(error).__name__}: {str(error).rstrip('.')}")
    except SignalException as received:
        return _stopped(notes, torchrun.determine_local_world_size(parsed.nproc_per_node), received.sigval)
    return _say_stopped("the job") if _has_saved(notes) else 0


def allow_ended_ranks() -> None:
    """Let torchrun stop ranks of which one has ended just now: it would leave the others, with a ProcessLookupError."""
    close = SubprocessHandler.close
    if getattr(close, "allows_ended", False):
        return

    @wraps(close)
    def close_if_there(handler: SubprocessHandler, death_sig: signal.Signals | None = None) -> None:
        with suppress(ProcessLookupError):
            close(handler, death_sig)

    close_if_there.allows_ended = True  # type: ignore[attr-defined]
    handler_class: Any = SubprocessHandler
    handler_class.close = close_if_there


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
    if name not in STOP_SIGNALS:
        return 128 + received
    if not has_begun(notes):
        _say(f"{name}: the job was stopped before its first step. Start it again.")
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
    return any(as_path(marker).exists() for marker in markers(notes))


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
