"""The position of this rank in its pipeline."""

from dataclasses import dataclass


@dataclass(frozen=True)
class StageManager:
    """This rank's position in its pipeline, and its neighbours. With one stage per rank, the position is the stage.

    Attributes:
        stage: this rank's position: the first of the stages that it runs.
        ranks: the global ranks of this pipeline, by position.
        placement: the position that runs each stage.
    """

    stage: int
    ranks: tuple[int, ...]
    placement: tuple[int, ...]

    @property
    def num_stages(self) -> int:
        """Ranks in the pipeline."""
        return len(self.ranks)

    @property
    def stages(self) -> tuple[int, ...]:
        """All stages that this rank runs."""
        return tuple(stage for stage, position in enumerate(self.placement) if position == self.stage)

    @property
    def prev_rank(self) -> int:
        """The rank before this one; for the first rank, the last."""
        return self.ranks[self.stage - 1]

    @property
    def next_rank(self) -> int:
        """The rank after this one; for the last rank, the first."""
        return self.ranks[(self.stage + 1) % self.num_stages]

    def is_first_stage(self, ignore_chunk: bool = False) -> bool:
        """Whether this rank runs the first stage; with ``ignore_chunk``, whether it is the pipeline's first rank."""
        return self.stage == (0 if ignore_chunk else self.placement[0])

    def is_last_stage(self, ignore_chunk: bool = False) -> bool:
        """Whether this rank runs the last stage; with ``ignore_chunk``, whether it is the pipeline's last rank.

        The two differ for a V-shaped placement, in which the first rank runs the last stage.
        """
        return self.stage == (self.num_stages - 1 if ignore_chunk else self.placement[-1])

    def get_rank(self) -> int:
        """This process's global rank."""
        return self.ranks[self.stage]

    def get_prev_rank(self) -> int:
        """The same as ``prev_rank``."""
        return self.prev_rank

    def get_next_rank(self) -> int:
        """The same as ``next_rank``."""
        return self.next_rank
