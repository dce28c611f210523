"""The schedule of a command: by name and sizes, or from a file."""

from pathlib import Path

from hybridpp.cli.commands.sizes import Sizes
from hybridpp.cli.files import reading
from hybridpp.errors import ConfigError
from hybridpp.schedule import Programs, check_on_devices, check_program, load_schedule, make_schedule


def sizes(arguments: Sizes) -> tuple[int, int]:
    """The numbers of ranks and micro-batches.

    Raises:
        ConfigError: one of them is missing.
    """
    if arguments.stages is None or arguments.microbatches is None:
        raise ConfigError("a named schedule needs sizes. Pass --stages and --microbatches.")
    return arguments.stages, arguments.microbatches


def programs_of(text: str, arguments: Sizes) -> Programs:
    """The programs of a schedule by its name and sizes, or from a file, checked.

    Raises:
        ConfigError: a size is missing or superfluous, or the file cannot be read.
        ScheduleError: the name is unknown, or the schedule in the file is invalid.
    """
    if Path(text).suffix or Path(text).is_file():
        return load_plan(text, arguments)
    return make_schedule(text, *sizes(arguments), arguments.chunks)


def load_plan(path: str, arguments: Sizes) -> Programs:
    """The programs of a file, checked.

    Raises:
        ConfigError: the file cannot be read, or sizes are given, too.
        ScheduleError: the file holds no schedule, or an invalid one.
    """
    if any(size is not None for size in (arguments.stages, arguments.microbatches, arguments.chunks)):
        raise ConfigError(f"{path} determines the sizes. Remove --stages, --microbatches and --chunks.")
    with reading(path):
        programs = load_schedule(path)
    check_program(programs)
    check_on_devices(programs)
    return programs
