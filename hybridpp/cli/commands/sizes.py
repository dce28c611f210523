"""The sizes of a schedule, which several commands take."""

from dataclasses import dataclass
from typing import Annotated

from hybridpp.cli.argtypes import count


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Sizes of a named schedule; a schedule's file has its own."""

    stages: Annotated[int | None, count("Ranks of the pipeline (pp_size).")] = None
    microbatches: Annotated[int | None, count("Micro-batches per batch.")] = None
    chunks: Annotated[int | None, count("Stages per rank, where there is a choice.")] = None
