"""What of a stage's forward activation checkpointing runs again in the backward pass."""

from collections.abc import Mapping
from typing import Any

import torch

from hybridpp.cluster import seed_place
from hybridpp.partition.intercept import Forward
from hybridpp.partition.stage_run import Again, StageRun


class Replay:
    """The unit handler of a stage's backward pass, for what activation checkpointing runs again.

    Units of other stages may be among that: they return what they did in the forward. Checkpointing has put the
    random generators back to where they stood before, and from that follows which call of a unit it is.

    Args:
        again: what the stage's forward noted.
        run: of the same stage and micro-batch, not run itself.
        device: where it computes.
    """

    def __init__(self, again: Mapping[tuple[str, int], Again], run: StageRun, device: torch.device):
        self._again = again
        self._run = run
        self.leavings = run.leavings
        self._device = device
        self._inside = False

    def __call__(self, name: str, forward: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        found = self._find(name)
        if found is not None and not self._inside and not self._run.is_own(found.place):
            output = self._run.foreign(found.place, (args, kwargs))
            seed_place(found.seed_behind, 0, self._device)
            return output
        before, self._inside = self._inside, True
        try:
            return forward(*args, **kwargs)
        finally:
            self._inside = before

    def _find(self, name: str) -> Again | None:
        calls = [again for (unit, _), again in self._again.items() if unit == name]
        return calls[0] if len(calls) == 1 else self._again.get((name, torch.default_generator.initial_seed()))
