"""One thread per process, set before torch loads: bit-equality needs equal kernels, and threads split sums."""

import gc
import os
import sys
import threading
from collections.abc import Hashable
from functools import cache
from types import SimpleNamespace
from typing import Any

import pytest
from covering import left_to_the_matrix
from tqdm import tqdm

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# Every worker and every interpreter that a test starts would compile the package, and each worker the tests: 25 s.
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
# tqdm's own lock is one of all processes that are forked: a child that is killed while it draws a bar leaves it locked
# for ever, and torch.compile draws bars. A thread of tqdm's would hold this one while others fork.
tqdm.set_lock(threading.RLock())
tqdm.monitor_interval = 0
# Imports make no garbage; a quarter of the time to collect tests went into looking for it.
gc.disable()


# They wait for processes, up to 20 s a test. Workers share out the tests in order, and the one that has these is idle
# half of the time: the others have both cores then, and no worker is left with one of these at the end.
FIRST = {
    ("cli", "test_run.py"),
    ("plugins", "test_on_device.py"),
    ("plugins", "test_failure.py"),
    ("plugins", "test_restart.py"),
    ("plugins", "test_killed_anywhere.py"),
    ("plugins", "test_killed_save.py"),
    ("plugins", "test_new_processes.py"),
    ("plugins", "test_one_message.py"),
    ("plugins", "test_waiting.py"),
    ("cluster", "test_watchdog.py"),
    ("examples", "test_vit.py"),
    ("examples", "test_lm.py"),
    ("examples", "test_custom.py"),
    ("gpu", "test_benchmarks.py"),
    ("cli", "test_main.py"),
    ("cli", "test_partition.py"),
    ("tests", "test_readme.py"),
    ("tests", "test_front_door.py"),
    ("partition", "test_compile_blocks.py"),
}

# What a trace does is tested here, but in some files: each test makes its own. So does each with fixtures that replace
# code, or look at what is logged.
MAKE_TRACES = {"cluster", "models", "module_adapter", "partition"}
TAKE_TRACES = {"test_order.py", "test_recompute.py"}
MAKING_TRACES = {"caplog", "capfd", "capsys", "monkeypatch", "recwarn"}
TRACES: dict[Hashable, Any] = {}
# Objects that tests make between two searches for garbage among them.
MANY = 100_000


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """One process more than cores: tests that wait for processes leave one of two cores idle a quarter of the time."""
    set_by_user = os.environ.get("PYTEST_XDIST_AUTO_NUM_WORKERS")
    return int(set_by_user) if set_by_user else len(os.sched_getaffinity(0)) + 1


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--matrix", action="store_true", help="run all cases of tests that are marked covering")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Long tests come first, then those that fork, while there is little memory to fork; the others keep their order.

    Of some, only cases that cover their parameters are run.
    """
    items.sort(key=lambda item: (item.path.parts[-2:] not in FIRST, not _forks(item.getparent(pytest.Module))))
    if not config.getoption("--matrix") and (left := set(left_to_the_matrix(items))):
        config.hook.pytest_deselected(items=[*left])
        items[:] = [item for item in items if item not in left]


@cache
def _forks(module: pytest.Module | None) -> bool:
    """Whether tests of a module may fork this process: what they import of helpers says so."""
    names = vars(module.obj).values() if module is not None else ()
    return any(getattr(one, "__module__", None) in {"processes", "forked_jobs", "two_hosts"} for one in names)


def pytest_collection_finish(session: pytest.Session) -> None:
    """What was imported stays until the end; a tenth of the time went into looking for garbage among it."""
    if "torch" in sys.modules:
        import torch
        from torch._subclasses.fake_tensor import FakeTensorMode

        # With no device, CUDA builds of torch 2.11 keep a pointer to what belongs to the thread that enters the first
        # fake mode, and crash once that has ended (pytorch #178950). In-process ranks are threads; this one stays.
        with FakeTensorMode():
            pass
        # For devices that are not in use, torch.manual_seed notes the stack each time, and keeps it: up to 2 ms.
        for device in (torch.cuda, torch.xpu, torch.mtia):
            if not device.is_available():
                device.traceback = SimpleNamespace(format_stack=list)
    gc.freeze()
    if any(item.path.name == "test_on_device.py" for item in session.items):
        from forked_jobs import keep_a_young_process

        keep_a_young_process()
    gc.enable()
    # Most of what tests make is freed without a search, and each search goes through all of it.
    gc.set_threshold(400_000, 10, 10)


def pytest_sessionfinish() -> None:
    if "forked_jobs" in sys.modules:
        sys.modules["forked_jobs"].let_young_processes_go()


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Jobs of in-process ranks take traces that earlier jobs made of equal models: a quarter of the time of the
    plugins' tests."""
    _set_aside_what_is_there()
    loopback = sys.modules.get("hybridpp.cluster.loopback")
    if loopback is not None:
        is_about_traces = item.path.parts[-2] in MAKE_TRACES and item.path.name not in TAKE_TRACES
        makes_traces = is_about_traces or MAKING_TRACES.intersection(item.fixturenames)
        loopback.Loopback.results_of_any_run = None if makes_traces else TRACES


def _set_aside_what_is_there() -> None:
    """A search for garbage goes through what the last tests have made, not through what all tests have left.

    Through that, it takes up to a second; dozens of tests search, some on each rank.
    """
    made, searches, _ = gc.get_count()
    if made > MANY or searches:
        gc.collect()
        gc.freeze()
