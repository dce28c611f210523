"""What the recipes of all libraries share: how a model that none of the registry's rules knows becomes a specimen."""

import copy
import inspect
import re
import signal
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from models.batches import Batch
from models.zoo import DoesNotBuild, Specimen, check_runs
from torch import nn

Attempt = Callable[[], nn.Module]

SAMPLES = 4
MAX_MIB, MAX_SECONDS = 250, 15.0
_TOO_LONG = f"takes more than {MAX_SECONDS:.0f} s"
_RANDOM = re.compile(r"drop|stochastic_depth")


@dataclass(frozen=True)
class Foreign:
    """A model that another library than transformers makes.

    Attributes:
        name: the library's, a full stop, and the model's in it.
        attempts: makes it, in one way after another, until one runs.
        batches: to try it with.
    """

    name: str
    attempts: Callable[[], Iterable[Attempt]]
    batches: Callable[[nn.Module], Iterable[Batch]]

    @property
    def library(self) -> str:
        """Which makes it."""
        return self.name.partition(".")[0]

    def build(self) -> Specimen:
        """The first attempt that trains, with the first batch that it trains on.

        Raises:
            DoesNotBuild: with the reasons that were given.
        """
        reasons: dict[str, None] = {}
        start = time.process_time()
        for attempt in self.attempts():
            for specimen in self._specimens(attempt, reasons):
                return specimen
            if time.process_time() - start > 3 * MAX_SECONDS:
                break
        raise DoesNotBuild("; ".join(reasons) or "there is no attempt")

    def _specimens(self, attempt: Attempt, reasons: dict[str, None]) -> Iterator[Specimen]:
        try:
            # Without gradients: what `weight_norm` computes and keeps could not be copied.
            with _time_limit(), torch.no_grad():
                torch.manual_seed(0)
                model = _stirred(without_chance(attempt().train()))
                _check_size(model)
        except Exception as error:
            reasons[_reason(error)] = None
            return
        for batch in self.batches(model):
            try:
                with _time_limit():
                    check_runs(copy.deepcopy(model), batch)
            except Exception as error:
                reasons[_reason(error)] = None
                if str(error) == _TOO_LONG:
                    return
            else:
                yield Specimen(model, batch, "")


def without_chance(model: nn.Module) -> nn.Module:
    """The model, with every probability of dropping something set to zero."""
    for module in model.modules():
        if re.search(r"Dropout|DropPath|StochasticDepth", type(module).__name__) and isinstance(
            vars(module).get("p"), float
        ):
            module.p = 0.0
        for name, value in list(vars(module).items()):
            if isinstance(value, float) and _RANDOM.search(name):
                setattr(module, name, 0.0)
    return model


def _stirred(model: nn.Module) -> nn.Module:
    """The model, with small numbers where a parameter is nothing but zeros: behind those, no gradient says anything."""
    for parameter in model.parameters():
        if not parameter.any():
            nn.init.normal_(parameter, std=0.02)
    return model


def takes(kind: Any) -> Mapping[str, inspect.Parameter]:
    """The parameters of a class or function, by name, without those that stand for any."""
    parameters = inspect.signature(kind).parameters
    return {name: p for name, p in parameters.items() if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)}


def first_input(model: nn.Module) -> str:
    """What a forward calls its first argument."""
    return next(iter(takes(model.forward)), "x")


def _check_size(model: nn.Module) -> None:
    mib = sum(tensor.numel() * tensor.element_size() for tensor in (*model.parameters(), *model.buffers())) / 2**20
    if mib > MAX_MIB:
        raise DoesNotBuild(f"needs {mib:.0f} MiB, more than {MAX_MIB}")


def _reason(error: Exception) -> str:
    text = " ".join(str(error).split())[:300]
    return text if isinstance(error, DoesNotBuild) else f"{type(error).__name__}: {text}"


@contextmanager
def _time_limit() -> Iterator[None]:
    """Stop what takes too long; time of the CPU, so that it does not matter what else the machine does."""

    def stop(*_: Any) -> None:
        raise DoesNotBuild(_TOO_LONG)

    previous = signal.signal(signal.SIGPROF, stop)
    signal.setitimer(signal.ITIMER_PROF, MAX_SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, previous)
