"""The schedule that a command is about: by name and sizes, or from a file."""

from argparse import ArgumentParser, Namespace
from pathlib import Path

from hybridpp.cli.files import reading
from hybridpp.cli.numbers import positive
from hybridpp.errors import ConfigError
from hybridpp.schedule import Programs, check_program, load_schedule, make_schedule


def add_sizes(parser: ArgumentParser) -> None:
    """Declare the sizes of a schedule that is given by name."""
    parser.add_argument("--stages", type=positive, metavar="N", help="ranks of the pipeline, the plugin's pp_size")
    parser.add_argument("--microbatches", type=positive, metavar="N", help="micro-batches per batch")
    parser.add_argument(
        "--chunks", type=positive, metavar="N", help="stages per rank, where the schedule lets you choose"
    )


def sizes(arguments: Namespace) -> tuple[int, int]:
    """The numbers of ranks and micro-batches.

    Raises:
        ConfigError: one is not given.
    """
    if arguments.stages is None or arguments.microbatches is None:
        raise ConfigError("a schedule has sizes. Give --stages and --microbatches.")
    return arguments.stages, arguments.microbatches


def programs_of(text: str, arguments: Namespace) -> Programs:
    """The programs of a schedule by its name and sizes, or from a file, checked.

    Raises:
        ConfigError: a size is missing, or too much; the file cannot be read.
        ScheduleError: there is no schedule of this name, or the file's does not run.
    """
    if Path(text).suffix or Path(text).is_file():
        return load_plan(text, arguments)
    return make_schedule(text, *sizes(arguments), arguments.chunks)


def load_plan(path: str, arguments: Namespace) -> Programs:
    """The programs of a file, checked.

    Raises:
        ConfigError: the file cannot be read, or sizes are given as well.
        ScheduleError: it holds no schedule, or one that does not run.
    """
    if any(size is not None for size in (arguments.stages, arguments.microbatches, arguments.chunks)):
        raise ConfigError(f"{path} says its sizes itself. Leave out --stages, --microbatches and --chunks.")
    with reading(path):
        programs = load_schedule(path)
    check_program(programs)
    return programs
