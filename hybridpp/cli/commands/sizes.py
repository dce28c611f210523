"""The sizes of a schedule, which several commands take."""

from dataclasses import dataclass
from typing import Annotated

from hybridpp.cli.argtypes import count


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Sizes of a named schedule; a schedule's file has its own."""

    stages: Annotated[int | None, count("The number of ranks in the pipeline (pp_size).")] = None
    microbatches: Annotated[int | None, count("The number of micro-batches in a batch.")] = None
    chunks: Annotated[int | None, count("The stages on each rank, where there is a choice.")] = None
