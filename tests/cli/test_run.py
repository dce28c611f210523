import ctypes
import inspect
import json
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from forked_jobs import forked_job
from support import ROOT
from torch.distributed import DistStoreError
from torch.distributed import run as torchrun
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.elastic.multiprocessing.subprocess_handler import SubprocessHandler
from torch.distributed.elastic.rendezvous import RendezvousConnectionError, RendezvousTimeoutError

from hybridpp.checkpoint.commit import committed_steps
from hybridpp.cli import main, run
from hybridpp.cli.run import gentle_ends
from hybridpp.cluster.launcher_notes import LauncherNotes

SCRIPT = ROOT / "tests/scripts/recovering.py"


@pytest.fixture
def torch_runs(monkeypatch, tmp_path):
    """Replaces what torchrun does by a function of its arguments and of the folder of notes."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1)}
    for name in ("HYBRIDPP_NOTES", "OMP_NUM_THREADS", "TORCH_CPP_LOG_LEVEL", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"):
        monkeypatch.setenv(name, os.environ.get(name, ""))
    monkeypatch.delenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE")
    monkeypatch.setattr(run, "_silence", lambda: None)
    monkeypatch.setattr(run, "wait_for_endpoint", lambda *_: True)
    script = tmp_path / "script.py"
    script.write_text("pass\n")

    def replace(function, *arguments):
        seen = []

        def replacement(parsed):
            seen.append(parsed)
            function(Path(os.environ["HYBRIDPP_NOTES"]))

        monkeypatch.setattr(torchrun, "run", replacement)
        code = main(["run", "--nproc-per-node", "2", *arguments, str(script), "--flag"])
        return code, seen[0] if seen else None

    yield replace
    for number, handler in handlers.items():
        signal.signal(number, handler)


def ended_by(*codes):
    def function(notes):
        failures = {rank: ProcessFailure(rank, 100 + rank, code, "") for rank, code in enumerate(codes)}
        raise ChildFailedError("script.py", failures)

    return function


def stopped_by(name, *, begun=True, ended=0, marker=None):
    def function(notes):
        for local_rank in range(2):
            rank = LauncherNotes(notes, local_rank)
            if begun:
                rank.step_done()
            if marker is not None:
                rank.will_mark(marker)
            if local_rank < ended:
                rank.ended()
        if name:
            raise SignalException("received", signal.Signals[name])

    return function


SEVERAL = ("--nnodes", "2", "--rdzv-backend", "c10d", "--rdzv-endpoint")
OWN_NAME = "this-host"
ADDRESSES = {OWN_NAME: {"10.0.0.1"}, "head": {"127.0.1.1"}, "10.0.0.1": {"10.0.0.1"}, "10.9.0.1": {"10.9.0.1"}}


@pytest.mark.parametrize(
    ("endpoint", "reached_from", "is_here", "more", "expected"),
    [
        ("10.9.0.7:29500", "10.9.0.2", False, (), ("10.9.0.2", "")),
        ("head:29500", "127.0.0.1", True, (), ("head", "")),
        ("10.0.0.1:29500", "10.0.0.1", True, (), ("10.0.0.1", "")),
        # An address that the host's own name has not.
        ("10.9.0.1:29500", "10.9.0.1", True, (), ("10.9.0.1", "is_host=true")),
        ("10.9.0.1:29500", "10.9.0.1", True, ("--local-addr", "me"), ("me", "is_host=true")),
        ("10.9.0.1:29500", "10.9.0.1", True, ("--rdzv-conf", "is_host=0"), ("10.9.0.1", "is_host=0")),
        ("nowhere:29500", "", False, (), (None, "")),
    ],
)
def test_hosts_are_known_by_addresses_that_others_reach(
    torch_runs, monkeypatch, endpoint, reached_from, is_here, more, expected
):
    monkeypatch.setattr(run, "address_towards", lambda host: reached_from)
    monkeypatch.setattr(run, "is_own", lambda host: is_here)
    monkeypatch.setattr(run, "addresses_of", lambda host: ADDRESSES.get(host, set()))
    monkeypatch.setattr(run.socket, "gethostname", lambda: OWN_NAME)
    _, parsed = torch_runs(lambda notes: None, *SEVERAL, endpoint, *more)
    conf = parsed.rdzv_conf.split(",")
    assert "read_timeout=600" in conf
    conf.remove("read_timeout=600")
    assert (parsed.local_addr, ",".join(conf)) == expected


def test_a_host_whose_own_name_nobody_knows_sees_if_it_is_the_endpoint(torch_runs, monkeypatch):
    monkeypatch.setattr(run, "addresses_of", lambda host: set() if host == OWN_NAME else {host})
    monkeypatch.setattr(run.socket, "gethostname", lambda: OWN_NAME)
    for is_here in (True, False):
        monkeypatch.setattr(run, "is_own", lambda host, is_here=is_here: is_here)
        _, parsed = torch_runs(lambda notes: None, *SEVERAL, "10.9.0.1:29500")
        assert parsed.rdzv_conf == f"read_timeout=600,is_host={str(is_here).lower()}"


@pytest.mark.parametrize(
    ("is_here", "endpoint", "conf", "expected"),
    [
        (False, "10.9.0.7", (), ("10.9.0.7", 29400, 600)),
        (False, "10.9.0.7:7", ("--rdzv-conf", "read_timeout=9"), ("10.9.0.7", 7, 9)),
        (True, "10.9.0.7", ("--rdzv-conf", "is_host=false"), ("10.9.0.7", 29400, 600)),
        (True, "10.9.0.7", (), None),
        (False, OWN_NAME, (), None),
        (False, "10.0.0.1", (), None),  # an address of its name, which none of its interfaces has
        (False, "10.9.0.7", ("--rdzv-conf", "is_host=true"), None),
    ],
)
def test_an_endpoint_on_another_host_is_waited_for(torch_runs, monkeypatch, capsys, is_here, endpoint, conf, expected):
    """Before torchrun, so that signals end the wait."""
    awaited = []
    monkeypatch.setattr(run, "is_own", lambda host: is_here)
    monkeypatch.setattr(run, "addresses_of", lambda host: ADDRESSES.get(host, set()))
    monkeypatch.setattr(run.socket, "gethostname", lambda: OWN_NAME)
    monkeypatch.setattr(run, "wait_for_endpoint", lambda *given: not awaited and awaited.append(given) is None)
    assert torch_runs(lambda notes: None, *SEVERAL, endpoint, *conf)[0] == 0
    assert awaited == [expected] * (expected is not None)
    monkeypatch.setattr(run, "wait_for_endpoint", lambda *given: False)
    if expected is not None:
        assert torch_runs(lambda notes: None, *SEVERAL, endpoint, *conf) == (1, None)
        assert (
            capsys.readouterr()
            .err.splitlines()[-1]
            .startswith(f"hybridpp run: nobody listens at the endpoint {endpoint} after ")
        )


@pytest.mark.parametrize(
    ("options", "awaited", "text"),
    [
        (["--nnodes", "2"], None, "2 hosts of the job are to meet at 127.0.0.1:29500: waits for at most 900 s."),
        (
            ["--nnodes=2", "--node-rank=1", "--master-addr=127.0.0.1", "--rdzv-conf=timeout=7"],
            ("127.0.0.1", 29500, 7),
            "2 hosts of the job are to meet at 127.0.0.1:29500: waits for at most 7 s.",
        ),
        (
            ["--nnodes=1:4", "--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:7", "--rdzv-conf=join_timeout=9"],
            None,
            "1 to 4 hosts of the job are to meet at 127.0.0.1:7: waits for at most 9 s.",
        ),
        (["--nnodes", "1"], None, ""),
    ],
)
def test_a_job_says_for_which_hosts_it_waits_and_how_long(torch_runs, monkeypatch, capsys, options, awaited, text):
    seen = []
    monkeypatch.setattr(run, "wait_for_endpoint", lambda *given: seen.append(given) is None)
    assert torch_runs(lambda notes: None, *options)[0] == 0
    assert seen == ([awaited] if awaited else [])
    assert capsys.readouterr().err == (f"hybridpp run: {text}\n" if text else "")


def test_a_signal_ends_the_wait_for_the_endpoint(torch_runs, monkeypatch, capsys):
    monkeypatch.setattr(run, "wait_for_endpoint", lambda *_: os.kill(os.getpid(), signal.SIGTERM))
    monkeypatch.setattr(run, "is_own", lambda host: False)
    assert torch_runs(lambda notes: None, *SEVERAL, "10.9.0.7:29500") == (143, None)
    assert (
        capsys.readouterr()
        .err.splitlines()[1]
        .startswith("hybridpp run: SIGTERM: the job was stopped before its first step.")
    )


def test_torchrun_gets_the_options_and_what_restarts_need(torch_runs):
    code, parsed = torch_runs(lambda notes: None, "--max-restarts", "3")
    assert code == 0
    assert (parsed.nproc_per_node, parsed.max_restarts, parsed.training_script_args) == ("2", 3, ["--flag"])
    assert parsed.shutdown_timeout == 600
    assert parsed.signals_to_handle.split(",") == ["SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT", "SIGUSR1"]
    assert not Path(parsed.log_dir).exists(), "the folder is removed"
    assert "TORCH_DISABLE_SHARE_RDZV_TCP_STORE" not in os.environ


def test_what_the_user_sets_stays(torch_runs, tmp_path, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "5")
    more = ["--shutdown-timeout", "7", "--signals-to-handle", "SIGUSR1", "--log-dir", str(tmp_path / "logs")]
    _, parsed = torch_runs(lambda notes: None, *more)
    assert (parsed.shutdown_timeout, parsed.signals_to_handle) == (7, "SIGUSR1,SIGTERM")
    assert (parsed.log_dir, os.environ["OMP_NUM_THREADS"]) == (str(tmp_path / "logs"), "5")


def test_attempts_on_several_hosts_share_no_store(torch_runs):
    torch_runs(lambda notes: None, "--nnodes", "1:2")
    assert os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] == "1"


@pytest.mark.parametrize(
    ("codes", "code", "text"),
    [
        ([1, -15], 1, "rank 0 failed, with exit code 1."),
        ([-15, -9], 1, "rank 1 was ended by SIGKILL. Where nobody sent that, the host may have been out of memory"),
        ([-15, 75], 75, "rank 1 ended a job that made no progress. Its report is above."),
    ],
)
def test_a_failure_is_one_line_and_a_code(torch_runs, capsys, codes, code, text):
    assert torch_runs(ended_by(*codes))[0] == code
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"hybridpp run: {text}")


def test_names_that_torchrun_does_not_know_are_two_lines(torch_runs, capsys):
    def function(notes):
        raise ValueError("The rendezvous backend 'foo' is not registered.")

    assert torch_runs(function)[0] == 2
    first, second = capsys.readouterr().err.splitlines()
    assert first == (
        "hybridpp: torchrun takes no such option: ValueError: The rendezvous backend 'foo' is not registered."
    )
    assert second == "See hybridpp run -h."


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (
            DistStoreError("nobody\nframe #0"),
            "hybridpp run: the hosts of the job did not meet, or have lost each other: ",
        ),
        (  # the endpoint's host went down, and is back
            RendezvousConnectionError("reset"),
            "hybridpp run: the hosts of the job did not meet, or have lost each other: ",
        ),
        (ImportError("no etcd\nmore"), "hybridpp: torchrun takes no such option: ImportError: no etcd.\nSee "),
    ],
)
def test_what_ends_torchrun_at_its_start_is_no_stack(torch_runs, capsys, error, text):
    def function(notes):
        raise error

    torch_runs(function)
    printed = capsys.readouterr().err
    assert printed.startswith(text)
    assert printed.count("\n") == text.count("\n") + 1


def test_hosts_that_do_not_meet_are_one_line(torch_runs, capsys):
    def function(notes):
        raise RendezvousTimeoutError("nobody came")

    assert torch_runs(function)[0] == 1
    assert capsys.readouterr().err == (
        "hybridpp run: the hosts of the job did not meet: RendezvousTimeoutError: nobody came. Start the job on each "
        "of them, with the same --nnodes and endpoint.\n"
    )


@pytest.mark.parametrize(
    ("job", "code", "text"),
    [
        (stopped_by("SIGTERM", marker="exists"), 143, "SIGTERM: the job was stopped, and has saved a checkpoint."),
        (stopped_by("SIGUSR1", marker="exists"), 143, "SIGUSR1: the job was stopped, and has saved a checkpoint."),
        # The signal came to ranks, not to this process.
        (stopped_by(None, ended=2, marker="exists"), 143, "the job was stopped, and has saved a checkpoint."),
        (stopped_by("SIGTERM", begun=False), 143, "SIGTERM: the job was stopped before its first step."),
        (stopped_by("SIGTERM"), 1, "SIGTERM: the job was stopped, and its last steps are lost: no checkpoint"),
        (stopped_by("SIGTERM", ended=1, marker="missing"), 1, "SIGTERM: the job was stopped, and its last steps are"),
        # It was at its end anyway.
        (stopped_by("SIGTERM", ended=2), 0, ""),
        (stopped_by(None, ended=2), 0, ""),
        (stopped_by("SIGINT"), 130, ""),
    ],
)
def test_the_code_of_a_stopped_job_says_whether_to_start_it_again(
    torch_runs, capsys, tmp_path, monkeypatch, job, code, text
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "exists").touch()
    assert torch_runs(job)[0] == code
    printed = capsys.readouterr().err
    assert printed.startswith(f"hybridpp run: {text}") if text else not printed


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (["--nproc-per-node", "x"], "--nnodes 1:1, --nproc-per-node x: Unsupported nproc_per_node value: x"),
        (
            ["--nproc-per-node", "0"],
            "a job needs at least one host and one rank on each: got --nnodes 1:1, --nproc-per",
        ),
        (["--nnodes", "3:2"], "a job needs at least one host and one rank on each: got --nnodes 3:2, --nproc-per"),
        (["--nnodes", "1:2:3"], "--nnodes 1:2:3, --nproc-per-node 1: nnodes=1:2:3 is not in "),
        (["--max-restarts", "-1"], "max_restarts must be >= 0"),
        (["--rdzv-conf", "x"], "The rendezvous configuration option 'x' must have a value specified"),
        ([*SEVERAL, "host", "--rdzv-conf", "is_host=x"], "The rendezvous configuration option 'is_host' does not "),
        (["--monitor-interval", "inf"], "--monitor-interval must be above 0 seconds, and finite: got inf"),
        (["--master-addr", "192.0.2.1", "--master-port", "7"], "a job of one host meets at an address of this host: "),
        (["--nnodes", "2", "--rdzv-conf", "timeout=0"], "--rdzv-conf timeout must be above 0 seconds: got 0."),
        (["--nnodes", "2", "--rdzv-conf", "timeout=x"], "The rendezvous configuration option 'timeout' does not "),
        (["--signals-to-handle", "SIGKILL"], "--signals-to-handle are names of signals that a process can catch: got "),
        (["--standalone", "--nnodes", "2"], "--standalone starts a job on one host: got --nnodes 2."),
        (["--local-addr", "no.such.invalid"], "--local-addr is a name or an address of this host: got no.such.invalid"),
        (["--rdzv-endpoint", "no.such.invalid:7"], "this host is to be the endpoint no.such.invalid:7, and knows no "),
        (
            ["--nnodes", "2", "--master-addr", "no.such.invalid"],
            "this host is to be the endpoint no.such.invalid:29500, ",
        ),
        (["--nnodes", "2", "--node-rank", "5"], "--node-rank is 0 to 1 with --nnodes 2: got 5"),
        ([*SEVERAL, "."], "hosts meet at a name or an address of one of them: got the endpoint ."),
        ([*SEVERAL, "h" * 64], "hosts meet at a name or an address of one of them: got the endpoint hhhh"),
        ([*SEVERAL, "host", "--local-addr", "."], "--local-addr is a name or an address of this host: got ."),
        ([*SEVERAL, "localhost:0"], "hosts meet at a port that all know: got the endpoint localhost:0."),
        (["--master-port", "99999"], "The port number of the rendezvous endpoint '127.0.0.1:99999' must be an"),
        (["--rdzv-endpoint", "host:abc"], "The port number of the rendezvous endpoint 'host:abc' must be"),
    ],
)
@pytest.mark.usefixtures("torch_runs")  # leaves the environment as it was
def test_options_that_torchrun_refuses_with_a_traceback_are_two_lines(capsys, tmp_path, monkeypatch, options, text):
    monkeypatch.setattr(torchrun, "run", lambda _: pytest.fail("no rank may start"))
    assert main(["run", *options, str(tmp_path / "script.py")]) == 2
    printed = capsys.readouterr().err
    assert printed.startswith(f"hybridpp: {text}")
    assert printed.endswith("See hybridpp run -h.\n")
    assert printed.count("\n") == 2


@pytest.mark.parametrize(
    ("source", "text"),
    [
        (None, " cannot be read: No such file or directory.\nPass the path of a script, and its arguments after it.\n"),
        (b"if\n", ", line 1: invalid syntax.\nCorrect the script.\n"),
        (b"\0", "null bytes.\nCorrect the script.\n"),
    ],
)
def test_a_script_that_no_rank_could_run_is_one_message(capsys, tmp_path, source, text):
    script = tmp_path / "other.py"
    if source is not None:
        script.write_bytes(source)
    assert main(["run", "--nproc-per-node", "8", str(script)]) == 2
    printed = capsys.readouterr().err
    assert printed.startswith(f"hybridpp: {script}")
    assert printed.endswith(text)


@pytest.mark.parametrize(
    ("arguments", "lines"),
    [
        ([], ["hybridpp: missing argument 'SCRIPT'.", "See hybridpp run --help."]),
        (
            ["--standalone"],
            ["hybridpp: the following arguments are required: training_script", "See hybridpp run -h."],
        ),
        (
            ["--max-restarts", "x", "a.py"],
            ["hybridpp: argument --max-restarts/--max_restarts: invalid int value: 'x'.", "See hybridpp run -h."],
        ),
    ],
)
def test_options_that_torchrun_refuses_are_two_lines(capsys, arguments, lines):
    assert main(["run", *arguments]) == 2
    rule, way_out = capsys.readouterr().err.splitlines()
    assert rule.startswith(lines[0])  # versions of Python name more, or fewer, of the missing arguments
    assert way_out == lines[1]


def test_the_options_of_torchrun_are_listed(capsys):
    with pytest.raises(SystemExit) as raised:
        main(["run", "-h"])
    assert raised.value.code == 0
    assert "--rdzv-endpoint" in capsys.readouterr().out


FLAGS = """
import json, os, sys
print(json.dumps(sys.argv[1:]), flush=True)
sys.exit(int(sys.argv[-1]))
"""


@pytest.mark.parametrize(
    ("options", "code"),
    [(["--nproc-per-node", "1"], 0), (["--nproc-per-node=1", "--standalone"], 3)],
    ids=str,
)
def test_a_script_gets_its_own_options_and_its_failure_is_the_code(tmp_path, options, code):
    script = tmp_path / "flags.py"
    script.write_text(FLAGS)
    given = ["--help", "--flag", "--nproc-per-node", "7", "-x", "--", "a b", str(code)]
    # Forked: a module, below, starts as users start theirs.
    with forked_job(main, "run", *options, str(script), *given) as job:
        assert job.end(100) == (1 if code else 0)
        assert json.loads(job.stdout) == given, job.stderr
        if code:
            assert job.stderr.splitlines()[-1] == "hybridpp run: rank 0 failed, with exit code 3."


def test_a_module_runs_with_its_options(tmp_path):
    (tmp_path / "flags.py").write_text(FLAGS)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])}
    command = [sys.executable, "-m", "hybridpp", "run", "-m", "flags", "--flag", "0"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=200)
    assert (done.returncode, json.loads(done.stdout)) == (0, ["--flag", "0"]), done.stderr


@pytest.mark.parametrize(
    ("logged", "line"),
    [
        (
            [
                "failed (exitcode: -9) local_rank: 3 (pid: 7) of binary: python",
                "3/4 attempts left; will restart worker group",
            ],
            "local rank 3 was ended by SIGKILL. The job starts again (3/4 attempts left).",
        ),
        (
            [
                "failed (exitcode: 1) local_rank: 0 (pid: 7) of binary: python",
                "1/4 attempts left; will restart worker group",
            ],
            "local rank 0 ended with exit code 1. The job starts again (1/4 attempts left).",
        ),
        (
            ["Detected 1 new nodes; will restart worker group"],
            "a host has failed, left or joined. The job starts again.",
        ),
    ],
)
def test_a_restart_is_one_line(capsys, logged, line):
    notice = run._RestartNotice()
    for text in logged:
        notice.emit(logging.LogRecord("torch", logging.INFO, "", 0, text, (), None))
    assert capsys.readouterr().err == f"hybridpp run: {line}\n"


def test_a_job_is_restarted_stopped_and_leaves_nothing(tmp_path):
    """A rank is killed, its job starts again, goes on, and is told to stop: nothing is left but the checkpoint."""
    path, temporary = tmp_path / "run", tmp_path / "temporary"
    path.mkdir(), temporary.mkdir()
    command = ["run", "--nproc-per-node", "2", "--max-restarts", "1", str(SCRIPT), str(path), "--steps", "1000000"]
    command += ["--asynchronous", "--die", "1:backward:3"]
    losses = path / "losses.jsonl"
    with forked_job(main, *command, environment={"TMPDIR": str(temporary)}) as job:
        while not (losses.exists() and '"attempt": 1' in losses.read_text() and '"step": 9' in losses.read_text()):
            assert job.process.is_alive(), job.stderr
            time.sleep(0.05)
        os.kill(job.process.pid, signal.SIGTERM)
        code, printed = job.end(100), job.stderr.splitlines()
    assert code == 143, printed
    # A line of a rank that misses the other may come before.
    assert printed[-2:] == [
        "hybridpp run: local rank 1 was ended by SIGKILL. The job starts again (1/1 attempts left).",
        "hybridpp run: SIGTERM: the job was stopped, and has saved a checkpoint. Start it again to go on.",
    ]
    steps = {file.read_text() for file in path.glob("stopped-*")}
    marker = json.loads((path / "checkpoints" / "interrupted.json").read_text())
    assert steps == {str(marker["step"])} == {str(max(committed_steps(path / "checkpoints")))}
    left = {name for name in os.listdir(path / "checkpoints") if not name.startswith("step-")}
    assert left == {"interrupted.json"}
    assert not list(temporary.iterdir())
    for file in path.glob("pid-*"):
        with pytest.raises(ProcessLookupError):
            os.kill(int(file.read_text()), 0)


def test_ctrl_c_while_ranks_import_is_one_line(tmp_path):
    script = tmp_path / "slow.py"
    script.write_text("import pathlib, os, time\npathlib.Path(f'{__file__}-{os.getpid()}').touch()\ntime.sleep(60)\n")
    command = [sys.executable, "-m", "hybridpp", "run", "--nproc-per-node", "2", str(script)]
    with subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True, start_new_session=True) as job:
        try:
            until = time.monotonic() + 100
            while len(list(tmp_path.glob("slow.py-*"))) < 2:
                assert job.poll() is None, job.communicate()
                assert time.monotonic() < until
                time.sleep(0.05)
            job.send_signal(signal.SIGINT)
            _, printed = job.communicate(timeout=60)
        finally:
            job.kill()
    line = "hybridpp run: SIGINT: the job was stopped before its first step. Start it again.\n"
    assert (job.returncode, printed) == (130, line)


def test_signals_end_a_wait_in_native_code(tmp_path, monkeypatch):
    """No handler of Python is called there."""
    monkeypatch.setattr(run, "_GRACE_S", 0.1)
    folder = tmp_path / "folder"
    folder.mkdir()

    def wait(_):
        signal.signal(signal.SIGTERM, run._raise_signal)
        with run._signals_end_native_waits(folder):
            threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGTERM)).start()
            mutex, lock = ctypes.create_string_buffer(64), ctypes.CDLL(None).pthread_mutex_lock
            lock(mutex)
            lock(mutex)  # never returns, after a signal neither

    with forked_job(wait) as job:
        code, printed = job.end(60), job.stderr
    line = "hybridpp run: SIGTERM: the job was stopped before its first step. Start it again.\n"
    assert (code, printed, folder.exists()) == (143, line, False)


def test_ranks_that_have_ended_are_no_reason_to_leave_others(tmp_path):
    close = SubprocessHandler.close
    with gentle_ends(tmp_path):
        ended = started("true")
        ended.proc.wait()
        ended.close(signal.SIGTERM)  # its group of processes is gone
        running = started("sleep", "60")
        running.close(signal.SIGTERM)
        assert running.proc.wait(timeout=30) == -signal.SIGTERM
    assert SubprocessHandler.close is close


@pytest.mark.parametrize(("has_launched", "expected"), [(False, signal.SIGTERM), (True, signal.SIGINT)])
def test_ctrl_c_is_told_to_ranks_that_have_launched(tmp_path, has_launched, expected):
    """The others, in their imports, would print a stack."""
    # Where these tests run in the background of a shell, processes that they start ignore the signal.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with gentle_ends(tmp_path):
            rank = started("sleep", "60")
            if has_launched:
                (tmp_path / f"launched-{rank.proc.pid}").touch()
            rank.close(signal.SIGINT)
            assert rank.proc.wait(timeout=30) == -expected
    finally:
        signal.signal(signal.SIGINT, before)


def started(*command):
    takes_more = "numa_options" in inspect.signature(SubprocessHandler).parameters
    given = {"env": {}, "stdout": None, "stderr": None, **({"numa_options": None} if takes_more else {})}
    return SubprocessHandler(command[0], command[1:], local_rank_id=0, **given)
