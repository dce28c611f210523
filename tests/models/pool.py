"""Processes that examine one architecture each, so that none depends on what those before it left behind."""

import json
import math
import multiprocessing
import os
import resource
import signal
import time
import traceback
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, NamedTuple

import torch
from models.zoo import Buildable
from transformers.models.llama import modeling_llama

MEMORY_GIB = 10
# Imported once, before the first fork: 2.4 s of what most models need.
assert modeling_llama

Result = dict[str, Any]


class Study(NamedTuple):
    """What is found out of every architecture.

    Attributes:
        examine: everything that is found of one, as it grows.
        keys: under which a result holds what came of each comparison.
        seconds: of the CPU that an architecture may take; ten times that of the clock.
    """

    examine: Callable[[Buildable], Iterator[Result]]
    keys: tuple[str, ...]
    seconds: int

    def broken_off(self, result: Result, reason: str) -> Result:
        """A result that did not get further: a model that builds is wrong wherever it was not compared."""
        if not result["builds"]:
            return {"builds": False, "reason": reason}
        return {key: {"right": False, "error": reason} for key in self.keys} | result

    def line(self, result: Result) -> str:
        """A result in one line."""
        if not result["builds"]:
            return f"does not build: {result['reason'][:150]}"
        found = [(key, result[key]) for key in self.keys if key in result]
        return " ".join(f"{key} {'right' if one['right'] else one['error'][:300]};" for key, one in found)


def _work(pipe: Connection, study: Study, architecture: Buildable, log: Path) -> None:
    torch.set_num_threads(1)
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_GIB << 30, MEMORY_GIB << 30))
    # At the hard limit the kernel kills without saying that it was this.
    resource.setrlimit(resource.RLIMIT_CPU, (study.seconds, study.seconds + 10))
    result: Result = {"builds": False}
    with log.open("a") as out:
        os.dup2(out.fileno(), 1)
        os.dup2(out.fileno(), 2)
        print(f"\n=== {architecture.name}", flush=True)
        try:
            for result in study.examine(architecture):
                pipe.send((False, result))
            pipe.send((True, result))
        except BaseException:
            pipe.send((True, study.broken_off(result, traceback.format_exc()[-300:])))


class _Worker:
    """A forked process that examines one architecture."""

    def __init__(self, study: Study, architecture: Buildable, log: Path):
        self.architecture = architecture
        self._study = study
        self._since = time.monotonic()
        self._so_far: Result = {"builds": False}
        context = multiprocessing.get_context("fork")
        self.pipe, theirs = context.Pipe()
        self._process = context.Process(target=_work, args=(theirs, study, architecture, log), daemon=True)
        self._process.start()
        theirs.close()

    def result(self) -> Result | None:
        """What came of the architecture; None while it is being examined."""
        done, reason = False, None
        try:
            while not done and self.pipe.poll():
                done, self._so_far = self.pipe.recv()
        except EOFError:
            self._process.join()
            slow = self._process.exitcode == -signal.SIGXCPU
            reason = f"takes more than {self._study.seconds} s" if slow else "the process died"
        if not done and time.monotonic() - self._since > 10 * self._study.seconds:
            reason = f"takes more than {10 * self._study.seconds} s"
        if not done and reason is None:
            return None
        self._process.kill()
        self._process.join()
        self.pipe.close()
        return self._so_far if done else self._study.broken_off(self._so_far, str(reason))


def sweep(study: Study, todo: list[Buildable], folder: Path, jobs: int, seconds: float = math.inf) -> None:
    """Examine architectures, ``jobs`` at a time, and begin no other after ``seconds``; one JSON file each."""
    start = time.monotonic()
    workers: list[_Worker] = []
    waiting = todo[::-1]
    done = 0
    while waiting or workers:
        if time.monotonic() - start > seconds:
            waiting.clear()
        while waiting and len(workers) < jobs:
            workers.append(_Worker(study, waiting.pop(), folder / "output.log"))
        wait([worker.pipe for worker in workers], timeout=1.0)
        for worker in list(workers):
            result = worker.result()
            if result is None:
                continue
            workers.remove(worker)
            done += 1
            name = worker.architecture.name
            (folder / f"{name}.json").write_text(json.dumps(result | {"name": name}, indent=1))
            print(f"{done}/{len(todo)} {name}: {study.line(result)}", flush=True)
