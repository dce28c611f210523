"""Where this rank stands in its pipeline."""

from dataclasses import dataclass


@dataclass(frozen=True)
class StageManager:
    """This rank's place in its pipeline, and its neighbours. With one stage per rank, the place is the stage.

    Attributes:
        stage: this rank's place: the first of the stages that it runs.
        ranks: the ranks of this pipeline, by place.
        placement: the place of every stage; with several stages per rank, these come again.
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
        return tuple(stage for stage, place in enumerate(self.placement) if place == self.stage)

    @property
    def prev_rank(self) -> int:
        """Rank before this one; the last one, for the first."""
        return self.ranks[self.stage - 1]

    @property
    def next_rank(self) -> int:
        """Rank behind this one; the first one, for the last."""
        return self.ranks[(self.stage + 1) % self.num_stages]

    def is_first_stage(self) -> bool:
        """Whether the model's inputs enter here."""
        return self.stage == self.placement[0]

    def is_last_stage(self) -> bool:
        """Whether the model's outputs and the loss are made here."""
        return self.stage == self.placement[-1]

    def get_rank(self) -> int:
        """This rank in the world."""
        return self.ranks[self.stage]

    def get_prev_rank(self) -> int:
        """The same as ``prev_rank``."""
        return self.prev_rank

    def get_next_rank(self) -> int:
        """The same as ``next_rank``."""
        return self.next_rank
