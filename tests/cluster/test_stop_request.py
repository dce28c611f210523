import os
import signal
import threading

import pytest
from processes import run_forked

from hybridpp.cluster.stop_request import CaughtSignals, StopRequest
from hybridpp.errors import ConfigError

TERM, USR1 = signal.SIGTERM, signal.SIGUSR1


@pytest.fixture
def handlers():
    """Puts back the handlers of this process, which a test changes."""
    before = {number: signal.getsignal(number) for number in (TERM, USR1)}
    yield before
    for number, handler in before.items():
        signal.signal(number, handler)


def send(number):
    os.kill(os.getpid(), number)


@pytest.mark.parametrize("number", [TERM, USR1])
def test_a_signal_after_the_first_step_began_is_a_request(handlers, number):
    stop = StopRequest(["SIGTERM", "SIGUSR1"])
    assert signal.getsignal(number) == handlers[number]
    stop.begin_step()
    assert (stop.own, stop.agreed) == (0, 0)
    send(number), send(number)
    assert (stop.own, stop.agreed) == (number, 0)
    stop.heard([0.0, float(stop.own), 0.0])
    assert stop.agreed == number
    stop.heard([0.0])
    assert stop.agreed == number, "it is not taken back"
    stop.ignore()
    assert signal.getsignal(number) == handlers[number]


def test_before_the_first_step_a_signal_ends_the_process():
    def run():
        StopRequest(["SIGTERM"])
        child = os.fork()
        if not child:
            send(TERM)
            os._exit(0)
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

    assert run_forked(run) == -TERM


def test_handlers_of_the_script_are_called_too(handlers):
    called = []
    signal.signal(TERM, lambda number, frame: called.append(number))
    stop = StopRequest(["SIGTERM"])
    stop.begin_step()
    send(TERM)
    assert (called, stop.own) == ([TERM], TERM)


def test_a_handler_that_was_put_in_front_stays_when_ours_goes(handlers):
    received, passed = [], []
    caught = CaughtSignals(["SIGUSR1"], received.append)
    signal.signal(USR1, lambda number, frame: passed.append(number))
    caught.catch()
    ours = signal.getsignal(USR1)
    signal.signal(USR1, lambda number, frame: ours(number, frame))
    send(USR1)
    caught.release()
    send(USR1)
    assert (received, passed) == ([USR1], [USR1, USR1])


def test_a_handler_in_front_of_one_that_went_does_what_was_done_before():
    def run():
        child = os.fork()
        if child:
            return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        signal.signal(USR1, signal.SIG_DFL)
        caught = CaughtSignals(["SIGUSR1"], lambda number: None)
        caught.catch()
        ours = signal.getsignal(USR1)
        signal.signal(USR1, lambda number, frame: ours(number, frame))
        send(USR1)
        caught.release()
        send(USR1)
        os._exit(0)

    assert run_forked(run) == -USR1


def test_ignored_signals_stay_ignored(handlers):
    signal.signal(USR1, signal.SIG_IGN)
    stop = StopRequest(["SIGUSR1"])
    stop.begin_step()
    send(USR1)
    assert stop.own == 0
    stop.ignore()
    assert signal.getsignal(USR1) == signal.SIG_IGN


def test_other_threads_set_no_handlers(handlers):
    stop = StopRequest(["SIGTERM"])
    thread = threading.Thread(target=stop.begin_step)
    thread.start()
    thread.join()
    assert signal.getsignal(TERM) == handlers[TERM]


def test_a_forked_child_has_the_handlers_of_before():
    def run():
        stop = StopRequest(["SIGTERM"])
        stop.begin_step()
        child = os.fork()
        if not child:
            send(TERM)
            os._exit(0)
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

    assert run_forked(run) == -TERM


@pytest.mark.parametrize("names", ["SIGTERM", ["SIGKILL"], ["TERM"], ["SIGINT"]])
def test_names_that_are_no_signals_to_catch_are_refused(names):
    with pytest.raises(ConfigError, match=r"^stop_signals are names of signals that a process can catch: got "):
        StopRequest(names)


def test_no_signals_are_caught_where_none_are_named(handlers):
    StopRequest([]).begin_step()
    assert signal.getsignal(TERM) == handlers[TERM]
