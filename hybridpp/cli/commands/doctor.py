"""``hybridpp doctor``: its arguments."""

from dataclasses import dataclass
from typing import Annotated

from hybridpp.cli.argtypes import count, option
from hybridpp.cli.command import Command


@dataclass(frozen=True, kw_only=True)
class DoctorArguments:
    """Examine the installation, this host, and links between ranks.

    Prints versions, devices, the backend that a job takes, and known problems with the way out; under torchrun, srun
    or mpirun also how fast messages between all ranks are. The exit code is 1 if a problem is an error.
    """

    ranks: Annotated[int, count("Start this number of ranks here, and measure between them.")] = 1
    address: Annotated[str | None, option("The address where ranks of srun or mpirun meet.", "HOST:PORT")] = None
    json: Annotated[bool, option("Print the report as JSON.", name="--json")] = False
    answer_to: Annotated[str | None, option("The file for the answer, which --ranks sets.", "FILE", hidden=True)] = None


DOCTOR = Command(
    name="doctor",
    arguments=DoctorArguments,
    work="hybridpp.cli.doctor:run",
    examples=(
        "hybridpp doctor",
        "hybridpp doctor --ranks 4 --json",
        "hybridpp doctor --address host0:29500",
    ),
)
