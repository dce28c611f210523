"""Random settings: each is accepted, or refused by an error of this library that names one of them.

PYTHONPATH=.:plugins:tests python tests/config/fuzz_settings.py [--count 10000] [--seed 0] [--only 17]

A case is a plugin, a booster, a dataclass of settings, a loader, a step or a trainer with one to four settings, most of
them wrong: another type, a number that is huge, negative or none, an array, a name with a mistake. What a plugin
accepts also makes its schedule. A case that takes more than 5 s of processor time counts as endless.
"""

import argparse
import dataclasses
import inspect
import logging
import math
import random
import resource
import signal
import string
import sys
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from decimal import Decimal
from enum import Enum
from fractions import Fraction
from pathlib import Path
from typing import Any, NamedTuple, get_args, get_type_hints

import hybridpp_plugins
import numpy
import torch
from hybridpp_plugins.schedule_planner import SchedulePlanner
from hybridpp_plugins.unsupported import SYNONYMS, OtherLibrarySettings
from torch import nn

import hybridpp.config
from hybridpp import Booster
from hybridpp.errors import HybridppError
from hybridpp.schedule import SCHEDULES
from hybridpp.trainer import Trainer

LIMIT_S, MEMORY_BYTES = 5.0, 4 << 30
# What other libraries call a setting, and what it is here, by which messages may name it.
ALIASES = {
    **SYNONYMS,
    **{
        "pp_size": "num_microbatches",
        "mixed_precision": "precision",
        "resume_from": "path",
        "test_dataloader": "batch",
    },
    **{"train_dataloader": "batch"},
    **{"offload_optim_frac": "offload_optimizer", "bucket_cap_mb": "ddp_bucket_cap_mb", "stage": "zero_stage"},
    **{"extra_dp_size": "zero_size", "cpu_offload": "offload_optimizer", "lr_scheduler": "LR scheduler"},
    **{"data_iter": "iterator", "reduce_bucket_size_in_m": "ddp_bucket_cap_mb", "shard_param_frac": "zero_stage"},
}
# Settings that are called; errors of what a case gives there are its own.
CALLED = ("schedule", "pp_style", "criterion", "collate_fn")
CONFIGS = [value for value in vars(hybridpp.config).values() if dataclasses.is_dataclass(value)]
PLUGINS = [getattr(hybridpp_plugins, name) for name in hybridpp_plugins.__all__ if name.endswith("Plugin")]


class Side(Enum):
    BEGINNING = 1


def _itself() -> list[Any]:
    endless: list[Any] = []
    endless.append(endless)
    return endless


NUMBERS = [
    0,
    1,
    2,
    3,
    4,
    7,
    8,
    -1,
    -7,
    2**31,
    2**63,
    2**64,
    10**30,
    10**400,
    True,
    False,
    0.0,
    -0.0,
    0.5,
    1.0,
    1.5,
    1e-320,
]
NUMBERS += [-0.5, 2.0, 1e30, 1e308, math.inf, -math.inf, math.nan, 1j, Decimal("0.5"), Decimal("NaN"), Fraction(1, 2)]
TEXTS = [
    "",
    " ",
    "1",
    "0",
    "-1",
    "nan",
    "True",
    "none",
    "None",
    "fp16",
    "bf16",
    "fp32",
    "FP16",
    "fp8",
    "float16",
    "step",
]
TEXTS += [
    "host",
    "microbatch",
    "before",
    "after",
    "flops",
    "time",
    "16GiB",
    "1e9 GiB",
    "9" * 400 + "GiB",
    "0GiB",
    "-1MiB",
]
TEXTS += [
    "split_gather",
    "ring",
    "column",
    "row",
    "cpu",
    "cuda:99",
    "meta",
    "*",
    "[",
    "!",
    "!*",
    "**",
    "\0",
    "ü€\ud800",
]
TEXTS += ["x" * 5000, "none.csv", "/dev/null", "/", "1f1b ", "zb_h1", "Adam", "layers.0"]
ARRAYS = [
    lambda: numpy.int64(2),
    lambda: numpy.float32(0.5),
    lambda: numpy.float64("nan"),
    lambda: numpy.bool_(True),
    lambda: numpy.str_("fp16"),
    lambda: numpy.array(2),
    lambda: numpy.array([1, 2]),
    lambda: numpy.array([]),
    lambda: numpy.array(["before", "after"]),
    lambda: torch.tensor(2),
    lambda: torch.tensor(0.5),
    lambda: torch.tensor([1, 2]),
    lambda: torch.tensor([]),
    lambda: torch.tensor(True),
    lambda: torch.ones(2, device="meta"),
    lambda: nn.Parameter(torch.ones(())),
]
OBJECTS = [
    *(
        lambda: None,
        lambda: ...,
        object,
        lambda: int,
        lambda: torch.float16,
        lambda: torch.int8,
        lambda: torch.device("cpu"),
    ),
    *(lambda: Path("none.json"), lambda: Side.BEGINNING, lambda: nn.Linear(2, 2), lambda: b"fp16"),
    *(lambda: len, lambda: lambda *_: 1 / 0, lambda: lambda *_: None, lambda: (_ for _ in ()), lambda: range(3)),
    *(_itself, lambda: NotImplemented, lambda: frozenset({1}), lambda: sys, lambda: Booster, lambda: slice(3)),
]


class Case(NamedTuple):
    """What is made with which settings."""

    target: str
    settings: dict[str, Any]
    make: Callable[[], Any]


class Endless(BaseException):
    """The limit of a case is over."""


def value(rng: random.Random, depth: int = 0) -> Any:
    """Any value."""
    kind = rng.randrange(12 if depth < 3 else 8)
    if kind < 3:
        return rng.choice(NUMBERS)
    if kind < 5:
        return rng.choice([*TEXTS, *SCHEDULES]) if rng.random() < 0.8 else typo(rng, rng.choice([*TEXTS, *SCHEDULES]))
    if kind == 5:
        return rng.choice(ARRAYS)()
    if kind < 8:
        return rng.choice(OBJECTS)()
    values = [value(rng, depth + 1) for _ in range(rng.randrange(4))]
    if kind < 10:
        return values if rng.random() < 0.7 else tuple(values)
    if kind == 10:
        return {rng.choice(TEXTS) if rng.random() < 0.8 else rng.choice(NUMBERS): one for one in values}
    return rng.choice(
        [[1, 2], [1], [2, 2], [["0F0", "0B0"]], ["*.router"], {"*.q_proj": "column"}, {"a": "before"}, [[]]]
    )


def typo(rng: random.Random, text: str) -> str:
    """A text with one character left out, doubled or changed."""
    at = rng.randrange(len(text) + 1)
    return text[:at] + rng.choice(["", text[at : at + 1] * 2, rng.choice(string.printable)]) + text[at + 1 :]


def likely(rng: random.Random, hint: Any, default: Any) -> Any:
    """A value that may be right, by the type."""
    choices = [one for one in get_args(hint) for one in (get_args(one) or (one,)) if isinstance(one, str | int)]
    if choices:
        return rng.choice(choices)
    if isinstance(default, bool):
        return rng.random() < 0.5
    return rng.choice([default, 1, 2, 0.5, 8])


def settings_of(rng: random.Random, names: Mapping[str, tuple[Any, Any]]) -> dict[str, Any]:
    """One to four settings, of which most are wrong."""
    found = {}
    for name in rng.sample(sorted(names), min(len(names), rng.randint(1, 4))):
        found[name] = value(rng) if rng.random() < 0.7 else likely(rng, *names[name])
    if rng.random() < 0.05:
        name = typo(rng, rng.choice(sorted(names)))
        found[name if name.isidentifier() else "unknown"] = value(rng)
    return found


def names_of(function: Any) -> dict[str, tuple[Any, Any]]:
    """The keywords of a function, with hint and default."""
    hints = get_type_hints(function)
    parameters = inspect.signature(function).parameters.values()
    known = {
        one.name: (hints.get(one.name, Any), None if one.default is one.empty else one.default)
        for one in parameters
        if one.kind in (one.POSITIONAL_OR_KEYWORD, one.KEYWORD_ONLY) and one.name not in ("self", "cls")
    }
    if inspect.isfunction(function) and function.__qualname__.startswith("HybridParallelPlugin"):
        known |= dict.fromkeys(OtherLibrarySettings.__annotations__, (Any, None))
    return known


PLUGIN_NAMES = {plugin: names_of(plugin.__init__) for plugin in PLUGINS}
CONFIG_NAMES = {
    config: {
        one.name: (hint, None)
        for one, hint in zip(dataclasses.fields(config), get_type_hints(config).values(), strict=False)
    }
    for config in CONFIGS
}
BOOSTER_NAMES = names_of(Booster.__init__)
LOADER_NAMES = names_of(hybridpp_plugins.HybridParallelPlugin.prepare_dataloader)
BOOST_NAMES = {
    name: known
    for name, known in names_of(Booster.boost).items()
    if name
    in ("criterion", "sample", "samples", "model_inputs", "loss_reduction", "dataloader", "lr_scheduler", "optimizer")
}
STEP_NAMES = {
    name: known for name, known in names_of(Booster.execute_pipeline).items() if name not in ("model", "optimizer")
}
TRAINER_NAMES = {
    **{name: known for name, known in names_of(Trainer.__init__).items() if name not in ("booster", "parts")},
    **names_of(Trainer.fit),
}


def case(seed: int, number: int) -> Case:
    """The case of a number."""
    rng = random.Random(f"{seed}:{number}")
    draw = rng.random()
    if draw < 0.5:
        plugin = rng.choices(PLUGINS, [3 if one is hybridpp_plugins.HybridParallelPlugin else 1 for one in PLUGINS])[0]
        given = settings_of(rng, PLUGIN_NAMES[plugin])
        return Case(plugin.__name__, given, lambda: _plugin(plugin, given))
    if draw < 0.75:
        config = rng.choice(CONFIGS)
        given = settings_of(rng, CONFIG_NAMES[config])
        return Case(config.__name__, given, lambda: _config(config, given))
    if draw < 0.83:
        given = settings_of(rng, BOOSTER_NAMES)
        if isinstance(given.get("plugin_kwargs"), dict) and rng.random() < 0.5:
            given["plugin_kwargs"] = settings_of(rng, PLUGIN_NAMES[PLUGINS[0]])
        return Case("Booster", given, lambda: Booster(**given))
    if draw < 0.88:
        given = settings_of(rng, LOADER_NAMES)
        return Case("prepare_dataloader", given, lambda: _loader(given))
    if draw < 0.93:
        given = settings_of(rng, BOOST_NAMES)
        return Case("boost", given, lambda: _boost(given))
    if draw < 0.97:
        given = settings_of(rng, STEP_NAMES)
        return Case("execute_pipeline", given, lambda: _step(given))
    given = settings_of(rng, TRAINER_NAMES)
    return Case("Trainer", given, lambda: _trainer(given))


def _plugin(kind: Any, given: Mapping[str, Any]) -> None:
    plugin = kind(**given)
    plugin._planner.programs(
        plugin.settings.pipeline.num_microbatches or 2, True, plugin.settings.pipeline.num_microbatches or 2
    )


def _config(kind: Any, given: Mapping[str, Any]) -> None:
    size = {"num_microbatches": 2} if kind is hybridpp.config.PipelineConfig and "microbatch_size" not in given else {}
    made = kind(**size | dict(given))
    if isinstance(made, hybridpp.config.PipelineConfig):
        SchedulePlanner(made, 2).programs(made.num_microbatches or 2, True, made.num_microbatches or 2)


def _parts() -> tuple[Booster, dict[str, Any]]:
    model = nn.Linear(2, 2)
    booster = Booster(hybridpp_plugins.HybridParallelPlugin(num_microbatches=2), device="cpu")
    return booster, {
        "model": model,
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.1),
        "criterion": nn.CrossEntropyLoss(),
    }


ROWS = [(torch.ones(2), 1)] * 8


def _loader(given: Mapping[str, Any]) -> None:
    options = {"dataset": ROWS, "batch_size": 2} | dict(given)
    next(iter(hybridpp_plugins.HybridParallelPlugin(num_microbatches=2).prepare_dataloader(**options)), None)


def _boost(given: Mapping[str, Any]) -> None:
    booster, parts = _parts()
    booster.boost(**(parts | dict(given)))


def _step(given: Mapping[str, Any]) -> None:
    booster, parts = _parts()
    boosted = booster.boost(**parts)
    data = iter([(torch.ones(4, 2), torch.tensor([0, 1, 1, 0]))])
    options = {"data_iter": data, "criterion": boosted.criterion} | dict(given)
    booster.execute_pipeline(model=boosted.model, optimizer=boosted.optimizer, **options)


class Enough(Exception):
    """A run of as many steps as it was told is going on."""


class Batches:
    """Two batches for each epoch, until there were enough."""

    def __init__(self, most: int):
        self._left = most

    def __iter__(self) -> Iterator[Any]:
        for _ in range(2):
            self._left -= 1
            if self._left < 0:
                raise Enough
            yield torch.ones(2, 2), torch.tensor([0, 1])


def _trainer(given: Mapping[str, Any]) -> None:
    booster, parts = _parts()
    boosted = booster.boost(**parts)
    fit = {name: one for name, one in given.items() if name in names_of(Trainer.fit)}
    made = Trainer(booster, boosted, **{name: one for name, one in given.items() if name not in fit})
    with suppress(Enough):
        made.fit(**({"train_dataloader": Batches(8), "epochs": 1} | fit))


@contextmanager
def limited(seconds: float) -> Iterator[None]:
    """Raise :class:`Endless` in what is inside after so many seconds of this process' time, or 20 times as long."""

    def stop(*_: Any) -> None:
        raise Endless

    before = [signal.signal(one, stop) for one in (signal.SIGPROF, signal.SIGALRM)]
    signal.setitimer(signal.ITIMER_PROF, seconds)
    signal.setitimer(signal.ITIMER_REAL, 20 * seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.setitimer(signal.ITIMER_REAL, 0)
        for one, handler in zip((signal.SIGPROF, signal.SIGALRM), before, strict=True):
            signal.signal(one, handler)


def run(one: Case) -> tuple[str, str]:
    """What became of a case: ``accepted``, ``refused``, ``unnamed``, ``raw`` or ``endless``, and why."""
    try:
        with warnings.catch_warnings(), limited(LIMIT_S):
            warnings.simplefilter("ignore")
            one.make()
    except Endless:
        return "endless", traceback.format_exc()
    except HybridppError as error:
        names = [*one.settings, *(str(value) for value in one.settings.values() if isinstance(value, str) and value)]
        names += [ALIASES[name] for name in one.settings if name in ALIASES]
        names += [str(name) for value in one.settings.values() if isinstance(value, Mapping) for name in value]
        told = str(error)
        return ("refused" if any(name in told for name in names) else "unnamed"), told
    except Exception as error:
        if isinstance(error, StopIteration) or any(callable(one.settings.get(name)) for name in CALLED):
            return "accepted", "what the script gave raised it, or had no data"
        unknown = isinstance(error, TypeError) and "got an unexpected keyword argument" in str(error)
        return ("refused" if unknown else "raw"), traceback.format_exc()
    return "accepted", ""


def told(one: Case) -> str:
    """A case in a line."""
    return f"{one.target}({', '.join(f'{name}={value!r:.120}' for name, value in one.settings.items())})"


def main() -> int:
    """Run the cases; the exit code is 1 if one of them failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", type=int, help="run this case alone, with its traceback")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY_BYTES, resource.getrlimit(resource.RLIMIT_DATA)[1]))
    counts: Counter[str] = Counter()
    kinds: dict[str, str] = {}
    numbers = range(arguments.count) if arguments.only is None else [arguments.only]
    for number in numbers:
        one = case(arguments.seed, number)
        what, why = run(one)
        counts[what] += 1
        if arguments.only is not None:
            print(f"{what}: {told(one)}\n{why}")
        elif what not in ("accepted", "refused"):
            lines = [line.strip() for line in why.splitlines() if line.strip()]
            place = next((line for line in reversed(lines) if line.startswith("File ") and "hybridpp" in line), "")
            error = lines[-1][:160] if lines else ""
            key = f"{what}: {error.partition(':')[0] if place else error[:40]} {place}"
            if key not in kinds:
                kinds[key] = f"{number}: {told(one)[:300]}"
                print(f"{key}\n  {error}\n  {kinds[key]}", flush=True)
    print(", ".join(f"{counts[name]} {name}" for name in ("accepted", "refused", "unnamed", "raw", "endless")))
    return 1 if counts["raw"] + counts["endless"] + counts["unnamed"] else 0


if __name__ == "__main__":
    raise SystemExit(main())
