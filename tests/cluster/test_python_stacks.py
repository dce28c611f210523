"""Stacks of this process and of a stopped or held one."""

import multiprocessing
import os
import signal
import threading
from code import InteractiveInterpreter

from torch.utils.data import DataLoader, Dataset

from hybridpp.cluster.python_stacks import StackDump, dump_of, is_compiling, stacks, user_code, worker_stacks
from hybridpp.cluster.rank_process import RankProcess


def test_the_users_code_is_the_innermost_frame_outside_of_libraries():
    assert user_code(threading.get_ident()).endswith("test_the_users_code_is_the_innermost_frame_outside_of_libraries")


def test_code_that_a_library_runs_from_text_is_not_the_users():
    names = {"found": [], "user_code": user_code, "number": threading.get_ident()}
    InteractiveInterpreter(names).runsource("found.append(user_code(number))", "<string>", "exec")
    exec("found.append(user_code(number))", names)
    of_library, own = names["found"]
    assert of_library.endswith("in test_code_that_a_library_runs_from_text_is_not_the_users")
    assert own == "<string>:1 in <module>"


def test_stacks_name_the_calls_of_the_thread_and_leave_out_others():
    text = stacks(threading.get_ident(), "hybridpp watchdog")
    assert "test_stacks_name_the_calls_of_the_thread_and_leave_out_others" in text
    assert not is_compiling()


def test_a_dump_is_read_from_outside():
    dump = StackDump()
    try:
        assert "test_a_dump_is_read_from_outside" in dump_of(RankProcess.own(), dump.descriptor)
    finally:
        dump.close()


class _Blocked(Dataset):
    def __init__(self):
        self.may_go_on = multiprocessing.get_context("fork").Event()

    def __len__(self):
        return 4

    def __getitem__(self, index):
        if index:
            self.may_go_on.wait()
        return index


def test_of_the_workers_of_a_dataloader_one_at_work_shows_its_stack():
    dump = StackDump()
    dataset = _Blocked()
    batches = iter(DataLoader(dataset, num_workers=1, multiprocessing_context="fork"))
    try:
        assert next(batches) == 0
        busy = batches._workers[0]
        idle_one = iter(DataLoader([0], num_workers=1, multiprocessing_context="fork"))
        assert next(idle_one) == 0
        found = worker_stacks(RankProcess.own(), dump.descriptor)
        assert str(busy.pid) in found
        assert "in __getitem__" in found[str(busy.pid)]
        assert "in wait" in found[str(busy.pid)].splitlines()[-1]
        assert str(idle_one._workers[0].pid) not in found
        assert {busy.pid, idle_one._workers[0].pid} <= {child.pid for child in RankProcess.own().children}
    finally:
        dump.close()
        dataset.may_go_on.set()
        del batches, idle_one


def test_a_stopped_process_and_one_that_has_ended_are_told_apart():
    child = os.fork()
    if child == 0:
        signal.pause()
        os._exit(0)
    process = RankProcess.own()._replace(pid=child, start=_start_of(child))
    try:
        os.kill(child, signal.SIGSTOP)
        os.waitpid(child, os.WUNTRACED)
        assert process.condition == "is stopped (SIGSTOP, or job control)"
        assert child in RankProcess.own().stopped_children
    finally:
        process.send(signal.SIGKILL)
        os.waitpid(child, 0)
    assert process.condition == "has ended"
    assert not process.send(signal.SIGTERM)


def _start_of(pid: int) -> str:
    with open(f"/proc/{pid}/stat") as file:
        return file.read().rpartition(")")[2].split()[19]
