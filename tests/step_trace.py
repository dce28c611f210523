"""Which files of the library a training step enters, by watching one."""

import ast
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch
from support import ROOT, boosted, first_microbatch, image_batch, model_loss, tiny_vit

from hybridpp.cluster import Loopback

LIBRARY = (f"{ROOT}/hybridpp/", f"{ROOT}/plugins/hybridpp_plugins/")
# What is entered below these is the model's call, or a message: the step hands over to it and gets a result.
MODEL, MESSAGES = "hybridpp/partition/staged_model.py", "hybridpp/cluster/"
SETTINGS = {"pp_size": 2, "num_microbatches": 2, "precision": "fp16", "max_norm": 1.0, "initial_scale": 8.0}


@dataclass
class Entered:
    """The files that were entered, relative to the repository's root, in the order of their first calls.

    Attributes:
        step: by the step itself.
        model: only below the call of a stage of the user's model.
        messages: in ``hybridpp/cluster/``, or only below it.
        functions: the code that ran in each file.
    """

    step: dict[str, None] = field(default_factory=dict)
    model: dict[str, None] = field(default_factory=dict)
    messages: dict[str, None] = field(default_factory=dict)
    functions: dict[str, set[CodeType]] = field(default_factory=dict)

    def __or__(self, other: "Entered") -> "Entered":
        names = self.functions.keys() | other.functions.keys()
        functions = {name: self.functions.get(name, set()) | other.functions.get(name, set()) for name in names}
        step = self.step | other.step
        model = {name: None for name in self.model | other.model if name not in step}
        messages = {name: None for name in self.messages | other.messages if name not in step | model}
        return Entered(step, model, messages, functions)

    def num_lines(self, name: str) -> int:
        """How many lines the functions of a file have that ran; nested ones count once."""
        spans = _function_lines(ROOT / name)
        starts = {code.co_firstlineno for code in self.functions[name]}
        return len({line for start in starts for line in spans.get(start, ())})


@cache
def _function_lines(path: Path) -> dict[int, range]:
    """The lines of each function, by the line that its code object gives as the first."""
    functions = [
        node
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    ]
    firsts = [min([node.lineno, *(one.lineno for one in node.decorator_list)]) for node in functions]
    return {first: range(first, (node.end_lineno or first) + 1) for first, node in zip(firsts, functions, strict=True)}


class _Watch:
    """A profile function of this thread."""

    def __init__(self) -> None:
        self.entered = Entered()
        # The frame below which everything is entered by the model's call, or by a message.
        self._below: FrameType | None = None
        self._files = self.entered.step

    def __call__(self, frame: FrameType, event: str, _: Any) -> None:
        if not frame.f_code.co_filename.startswith(LIBRARY):
            return
        name = str(Path(frame.f_code.co_filename).relative_to(ROOT))
        if event == "return" and frame is self._below:
            self._below, self._files = None, self.entered.step
        elif event == "call":
            self.entered.functions.setdefault(name, set()).add(frame.f_code)
            self._enter(name, frame)

    def _enter(self, name: str, frame: FrameType) -> None:
        if self._below is None and name.startswith(MESSAGES):
            self._below, self._files = frame, self.entered.messages
        files = self.entered.messages if name.startswith(MESSAGES) else self._files
        files[name] = None
        if self._below is None and name == MODEL:
            self._below, self._files = frame, self.entered.model


@contextmanager
def watched() -> Iterator[Entered]:
    """What this thread enters inside."""
    watch, before = _Watch(), sys.getprofile()
    sys.setprofile(watch)
    try:
        yield watch.entered
    finally:
        sys.setprofile(before)
        for part in (watch.entered.model, watch.entered.messages):
            for name in part.keys() & watch.entered.step.keys():
                del part[name]


def entered_by_a_step(**settings: Any) -> list[Entered]:
    """What ``execute_pipeline`` and ``optimizer.step`` enter on each of two stages: in the third step of a tiny ViT.

    The first step makes and checks the schedule, traces the model for its inputs, and looks at what a script may have
    meant otherwise; all of that is kept. Until the second update it is seen what the script does with weights.
    """
    settings = {**SETTINGS, **settings}

    def run() -> Entered:
        batch = image_batch(4)
        sample = first_microbatch(batch, settings)
        booster, model, optimizer = boosted(tiny_vit(), _adamw, sample, **settings)
        data = iter([batch] * 3)

        def step() -> None:
            booster.execute_pipeline(data, model, model_loss, optimizer)
            optimizer.step()

        step()
        step()
        with watched() as entered:
            step()
        return entered

    return Loopback(int(settings["pp_size"])).run(run)


_adamw: Callable[[Any], torch.optim.Optimizer] = torch.optim.AdamW
