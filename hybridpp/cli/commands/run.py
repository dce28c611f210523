"""``hybridpp run``: all that it takes is torchrun's."""

from dataclasses import dataclass
from typing import Annotated

from hybridpp.cli.argtypes import argument
from hybridpp.cli.command import Command


@dataclass(frozen=True, kw_only=True)
class RunArguments:
    """Start a script on several ranks: torchrun that can be stopped.

    Its settings let a job be stopped and started again. All options are torchrun's: `hybridpp run -h` lists them.
    """

    arguments: Annotated[list[str], argument("The options of torchrun, the script, and its arguments.", "SCRIPT")]


RUN = Command(
    name="run",
    arguments=RunArguments,
    work="hybridpp.cli.run:run",
    examples=(
        "hybridpp run --nproc-per-node 8 --max-restarts 3 train.py --lr 1e-4",
        "hybridpp run --nproc-per-node 8 -m package.train --lr 1e-4",
    ),
    # What typer does not know is torchrun's; from the first argument that is no option on, nothing is looked at.
    settings={"ignore_unknown_options": True, "allow_interspersed_args": False},
)
