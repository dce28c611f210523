"""``hybridpp checkpoint``: its commands and their arguments."""

from dataclasses import dataclass
from typing import Annotated, Literal

from hybridpp.cli.argtypes import argument, count, index, option
from hybridpp.cli.command import Command, CommandGroup

_RUN = "Folder or URL that booster.save was given."
_OUT = "What is written; nothing is overwritten."


@dataclass(frozen=True, kw_only=True)
class ListArguments:
    """What a folder of checkpoints holds."""

    path: Annotated[str, argument(_RUN)]


@dataclass(frozen=True, kw_only=True)
class VerifyArguments:
    """Read every file, and compare it with its digest."""

    path: Annotated[str, argument(_RUN)]
    step: Annotated[int | None, index("Only this one (default: every step).")] = None


@dataclass(frozen=True, kw_only=True)
class ShowArguments:
    """What a checkpoint holds."""

    path: Annotated[str, argument(_RUN)]
    step: Annotated[int | None, index("Of the checkpoint (default: the newest).")] = None
    tensors: Annotated[bool, option("List every tensor.", name="--tensors")] = False


@dataclass(frozen=True, kw_only=True)
class ExportArguments:
    """Write a model of a checkpoint in another format."""

    path: Annotated[str, argument(_RUN)]
    out: Annotated[str, argument(_OUT)]
    to: Annotated[
        Literal["hf", "dcp", "torch"],
        option("The format: for from_pretrained, torch.distributed.checkpoint or torch.load."),
    ]
    step: Annotated[int | None, index("Of the checkpoint (default: the newest).")] = None
    model: Annotated[int | None, index("Number of the model, if the run had several; the first one is 0.")] = None
    dtype: Annotated[
        Literal["as-before", "float32", "bfloat16", "float16", "float64"],
        option("Of weights; as-before: what they had before boost."),
    ] = "as-before"
    config: Annotated[str | None, option("hf: folder with a config.json to use instead of the run's.", "FOLDER")] = None
    size_per_shard: Annotated[int, count("hf: most of a file, in MB.")] = 1024


@dataclass(frozen=True, kw_only=True)
class ImportArguments:
    """Make a checkpoint of weights in another format, for booster.resume."""

    path: Annotated[
        str,
        argument("Folder of transformers or of torch.distributed.checkpoint, or file of torch.save or of safetensors."),
    ]
    out: Annotated[str, argument(_OUT)]
    step: Annotated[int, index("Of the checkpoint.")] = 0


@dataclass(frozen=True, kw_only=True)
class ReshardArguments:
    """Write a checkpoint anew, as another number of ranks would have."""

    path: Annotated[str, argument(_RUN)]
    out: Annotated[str, argument(_OUT)]
    step: Annotated[int | None, index("Of the checkpoint (default: the newest).")] = None
    ranks: Annotated[int, count("Number of ranks, of which each has files of its own.")] = 1
    file_size: Annotated[str, option("The most that a file holds.", "SIZE")] = "1GiB"


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
