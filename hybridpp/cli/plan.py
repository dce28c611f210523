"""``hybridpp plan``: the fastest layouts of a model on some devices that fit in their memory."""

import json
import time
from argparse import ArgumentParser, ArgumentTypeError, Namespace

from hybridpp.cli.argtypes import positive
from hybridpp.cli.estimate_flags import add_model_flags, estimator_of
from hybridpp.cli.plan_table import render_plan
from hybridpp.estimate import SearchSpace, plugin_call, search, values_of
from hybridpp.sizes import parse_bytes

_GIB = 2**30


def add_arguments(parser: ArgumentParser) -> None:
    """Declare the flags."""
    add_model_flags(parser)
    parser.add_argument("--devices", type=positive, required=True, metavar="N", help="ranks of the job")
    parser.add_argument("--global-batch", type=positive, required=True, metavar="N", help="samples of a step")
    parser.add_argument(
        "--memory", metavar="SIZE", help="that a rank may use, as 72GiB (default: 9/10 of the device's)"
    )
    parser.add_argument("--schedules", type=_names, default=None, metavar="NAME,...", help="pipeline schedules to try")
    parser.add_argument("--tp-sizes", type=_numbers, metavar="N,...", help="to try (default: powers of 2 in a host)")
    parser.add_argument("--pp-sizes", type=_numbers, metavar="N,...", help="to try (default: all that divide)")
    parser.add_argument("--microbatch-sizes", type=_numbers, metavar="N,...", help="to try (default: 1,2,4,8,16)")
    parser.add_argument("--zero-stages", type=_zero_stages, default=(0, 1, 2, 3), metavar="N,...", help="to try")
    parser.add_argument("--no-recompute", action="store_true", help="do not try to recompute blocks")
    parser.add_argument("--enable-sequence-parallelism", action="store_true", help="shard sequences where tp_size > 1")
    parser.add_argument("--top", type=positive, default=10, metavar="N", help="how many to print (default: 10)")
    parser.add_argument("--json", action="store_true", help="print JSON: bytes and milliseconds")


def run(arguments: Namespace) -> str:
    """Returns the table, or JSON."""
    settings = {"enable_sequence_parallelism": True} if arguments.enable_sequence_parallelism else {}
    start = time.perf_counter()
    estimator = estimator_of(arguments, settings)
    device = estimator.given.device
    memory = 0.9 * device.memory_gib * _GIB if arguments.memory is None else parse_bytes("--memory", arguments.memory)
    space = SearchSpace(
        num_devices=arguments.devices,
        memory_bytes=int(memory),
        global_batch=arguments.global_batch,
        tp_sizes=arguments.tp_sizes,
        pp_sizes=arguments.pp_sizes,
        microbatch_sizes=arguments.microbatch_sizes,
        zero_stages=arguments.zero_stages,
        recomputes=(False,) if arguments.no_recompute else (False, True),
        num_kept=arguments.top,
        **({} if arguments.schedules is None else {"schedules": arguments.schedules}),
    )
    result = search(estimator, space)
    if arguments.json:
        found = [
            {**values_of(one), "call": plugin_call(one, arguments.precision), "settings": dict(one.settings)}
            for one in result.best
        ]
        return json.dumps({"best": found, "num_candidates": result.num_candidates}, indent=2)
    return render_plan(result, arguments.precision, device, time.perf_counter() - start)


def _names(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(","))


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(positive(number.strip()) for number in text.split(","))


def _zero_stages(text: str) -> tuple[int, ...]:
    found = text.split(",")
    if not set(found) <= {"0", "1", "2", "3"}:
        raise ArgumentTypeError(f"zero_stage must be 0, 1, 2 or 3: got {text!r}")
    return tuple(map(int, found))
