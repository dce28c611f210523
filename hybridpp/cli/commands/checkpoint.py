"""``hybridpp checkpoint``: its commands and their arguments."""

from dataclasses import dataclass
from typing import Annotated, Literal

from hybridpp.cli.argtypes import argument, count, index, option
from hybridpp.cli.command import Command, CommandGroup

_RUN = "The folder or URL that booster.save was given."
_OUT = "The folder or file to write; nothing is overwritten."
_STEP = "The step of the checkpoint (default: the newest one)."


@dataclass(frozen=True, kw_only=True)
class ListArguments:
    """List the checkpoints in a folder."""

    path: Annotated[str, argument(_RUN)]


@dataclass(frozen=True, kw_only=True)
class VerifyArguments:
    """Read every file, and compare it with its digest."""

    path: Annotated[str, argument(_RUN)]
    step: Annotated[int | None, index("The step to verify (default: every step).")] = None


@dataclass(frozen=True, kw_only=True)
class ShowArguments:
    """Show what a checkpoint holds."""

    path: Annotated[str, argument(_RUN)]
    step: Annotated[int | None, index(_STEP)] = None
    tensors: Annotated[bool, option("Also list every tensor.", name="--tensors")] = False


@dataclass(frozen=True, kw_only=True)
class ExportArguments:
    """Write a model of a checkpoint in another format."""

    path: Annotated[str, argument(_RUN)]
    out: Annotated[str, argument(_OUT)]
    to: Annotated[
        Literal["hf", "dcp", "torch"],
        option("The library that reads it: transformers, torch.distributed.checkpoint or torch.load."),
    ]
    step: Annotated[int | None, index(_STEP)] = None
    model: Annotated[int | None, index("The number of the model in a run of several; the first one is 0.")] = None
    dtype: Annotated[
        Literal["as-before", "float32", "bfloat16", "float16", "float64"],
        option("The precision of the weights; as-before is that before boost."),
    ] = "as-before"
    config: Annotated[str | None, option("A folder whose config.json replaces the run's, for --to hf.", "FOLDER")] = (
        None
    )
    size_per_shard: Annotated[int, count("The most that a file holds, in MB, for --to hf.")] = 1024


@dataclass(frozen=True, kw_only=True)
class ImportArguments:
    """Make a checkpoint of weights in another format, for booster.resume."""

    path: Annotated[
        str,
        argument(
            "The folder of transformers or torch.distributed.checkpoint, or the file of torch.save or safetensors."
        ),
    ]
    out: Annotated[str, argument(_OUT)]
    step: Annotated[int, index("The step that the new checkpoint gets.")] = 0


@dataclass(frozen=True, kw_only=True)
class ReshardArguments:
    """Write a checkpoint anew, as another number of ranks would have."""

    path: Annotated[str, argument(_RUN)]
    out: Annotated[str, argument(_OUT)]
    step: Annotated[int | None, index(_STEP)] = None
    ranks: Annotated[int, count("The number of ranks that the files are made for.")] = 1
    file_size: Annotated[str, option("The most that a file holds, with its unit.", "SIZE")] = "1GiB"


_LOOK, _CONVERT = "hybridpp.cli.checkpoint", "hybridpp.cli.checkpoint_formats"

CHECKPOINT = CommandGroup(
    name="checkpoint",
    help="List, verify, show and convert checkpoints of runs.",
    commands=(
        Command(
            name="list",
            arguments=ListArguments,
            work=f"{_LOOK}:run_list",
            examples=("hybridpp checkpoint list outputs/run", "hybridpp checkpoint list s3://bucket/run"),
        ),
        Command(
            name="verify",
            arguments=VerifyArguments,
            work=f"{_LOOK}:run_verify",
            examples=("hybridpp checkpoint verify outputs/run", "hybridpp checkpoint verify outputs/run --step 100"),
        ),
        Command(
            name="show",
            arguments=ShowArguments,
            work=f"{_LOOK}:run_show",
            examples=("hybridpp checkpoint show outputs/run --step 100 --tensors",),
        ),
        Command(
            name="export",
            arguments=ExportArguments,
            work=f"{_CONVERT}:run_export",
            examples=(
                "hybridpp checkpoint export outputs/run outputs/my_vit --to hf",
                "hybridpp checkpoint export outputs/run outputs/my_vit.pt --to torch --step 100",
            ),
        ),
        Command(
            name="import",
            arguments=ImportArguments,
            work=f"{_CONVERT}:run_import",
            examples=("hybridpp checkpoint import path/to/model outputs/run",),
        ),
        Command(
            name="reshard",
            arguments=ReshardArguments,
            work=f"{_CONVERT}:run_reshard",
            examples=("hybridpp checkpoint reshard outputs/run outputs/copy --ranks 8 --file-size 256MiB",),
        ),
    ),
)
