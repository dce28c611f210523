"""What starts the processes of a job, and how a process finds out which of them started it."""

from collections.abc import Mapping
from typing import NamedTuple

TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
SLURM = ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID")
OPENMPI = ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK")


class Starter(NamedTuple):
    """A program that starts processes as ranks.

    Attributes:
        name: that users type.
        variables: that it sets in every process.
        size: the one of them with the number of processes.
        call: of hybridpp, by which a process joins the others.
    """

    name: str
    variables: tuple[str, ...]
    size: str
    call: str


# In this order: accelerate sets torchrun's variables and its own, srun may set those of mpiexec. The script of a batch
# job is no step of SLURM's, though the job has several tasks.
STARTERS = (
    Starter("accelerate launch", (*TORCHRUN, "ACCELERATE_MIXED_PRECISION"), "WORLD_SIZE", "launch_from_torch()"),
    Starter("torchrun", TORCHRUN, "WORLD_SIZE", "launch_from_torch()"),
    Starter("mpirun", OPENMPI, OPENMPI[1], "launch_from_openmpi(host, port)"),
    Starter("srun", (*SLURM, "SLURM_STEP_NUM_TASKS"), "SLURM_STEP_NUM_TASKS", "launch_from_slurm(host, port)"),
    Starter("mpiexec", ("PMI_RANK", "PMI_SIZE"), "PMI_SIZE", "launch(rank, world_size, host, port)"),
)


def starter_of(environment: Mapping[str, str]) -> Starter | None:
    """What started a process with this environment as one of several; None: nothing did."""
    for starter in STARTERS:
        if all(name in environment for name in starter.variables) and environment[starter.size].strip() != "1":
            return starter
    return None
