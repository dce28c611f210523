"""``hybridpp plan``: the fastest layouts of a model on some devices that fit in their memory."""

import json
import time

from hybridpp.cli.argtypes import counts
from hybridpp.cli.commands.plan import PlanArguments
from hybridpp.cli.estimate_flags import estimator_of
from hybridpp.cli.output import show, working
from hybridpp.cli.plan_table import render_plan
from hybridpp.errors import ConfigError
from hybridpp.estimate import SearchSpace, plugin_call, search, values_of
from hybridpp.sizes import parse_bytes

_GIB = 2**30


def run(arguments: PlanArguments) -> None:
    """Print the table, or JSON."""
    settings = {"enable_sequence_parallelism": True} if arguments.enable_sequence_parallelism else {}
    start = time.perf_counter()
    with working("build the model on the meta device"):
        estimator = estimator_of(arguments, settings)
    device = estimator.given.device
    memory = 0.9 * device.memory_gib * _GIB if arguments.memory is None else parse_bytes("--memory", arguments.memory)
    space = SearchSpace(
        num_devices=arguments.devices,
        memory_bytes=int(memory),
        global_batch=arguments.global_batch,
        tp_sizes=_numbers("--tp-sizes", arguments.tp_sizes),
        pp_sizes=_numbers("--pp-sizes", arguments.pp_sizes),
        microbatch_sizes=_numbers("--microbatch-sizes", arguments.microbatch_sizes),
        zero_stages=_zero_stages(arguments.zero_stages),
        recomputes=(False,) if arguments.no_recompute else (False, True),
        num_kept=arguments.top,
        **({} if arguments.schedules is None else {"schedules": _names(arguments.schedules)}),
    )
    with working("search"):
        result = search(estimator, space)
    if arguments.json:
        found = [
            {**values_of(one), "call": plugin_call(one, arguments.precision), "settings": dict(one.settings)}
            for one in result.best
        ]
        show(json.dumps({"best": found, "num_candidates": result.num_candidates}, indent=2))
    else:
        show(*render_plan(result, arguments.precision, device, time.perf_counter() - start))


def _names(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(","))


def _numbers(flag: str, text: str | None) -> tuple[int, ...] | None:
    numbers = counts(flag, text)
    return None if numbers is None else tuple(numbers)


def _zero_stages(text: str) -> tuple[int, ...]:
    found = [stage.strip() for stage in text.split(",")]
    if not set(found) <= {"0", "1", "2", "3"}:
        raise ConfigError(f"zero_stage must be 0, 1, 2 or 3: got {text!r}. Separate several by commas, as 0,1.")
    return tuple(map(int, found))
