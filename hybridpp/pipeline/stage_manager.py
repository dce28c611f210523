"""Where this rank stands in its pipeline."""

from dataclasses import dataclass


@dataclass(frozen=True)
class StageManager:
    """This rank's stage and its neighbours.

    Attributes:
        stage: which stage this rank runs.
        ranks: the ranks of this pipeline, by stage.
    """

    stage: int
    ranks: tuple[int, ...]

    @property
    def num_stages(self) -> int:
        """Stages in the pipeline."""
        return len(self.ranks)

    @property
    def prev_rank(self) -> int:
        """Rank of the previous stage; of the last one, for the first."""
        return self.ranks[self.stage - 1]

    @property
    def next_rank(self) -> int:
        """Rank of the next stage; of the first one, for the last."""
        return self.ranks[(self.stage + 1) % self.num_stages]

    def is_first_stage(self) -> bool:
        """Whether the model's inputs enter here."""
        return self.stage == 0

    def is_last_stage(self) -> bool:
        """Whether the model's outputs and the loss are made here."""
        return self.stage == self.num_stages - 1

    def get_rank(self) -> int:
        """This rank in the world."""
        return self.ranks[self.stage]

    def get_prev_rank(self) -> int:
        """The same as ``prev_rank``."""
        return self.prev_rank

    def get_next_rank(self) -> int:
        """The same as ``next_rank``."""
        return self.next_rank
