"""Recomputation of a stage's forward by activation checkpointing in the backward pass."""

from collections.abc import Mapping
from typing import Any

import torch

from hybridpp.cluster import seed_stream
from hybridpp.module_adapter import Forward
from hybridpp.partition.stage_run import CheckpointedCall, StageRun


class Replay:
    """The unit handler of a stage's backward pass, for calls that activation checkpointing repeats.

    Units of other stages return what they returned in the forward. Checkpointing has restored the random generators;
    the seed identifies the call of a unit.

    Args:
        calls: what the stage's forward recorded.
        run: another stage run of the same stage and micro-batch, not used yet.
        device: the stage's device.
    """

    def __init__(self, calls: Mapping[tuple[str, int], CheckpointedCall], run: StageRun, device: torch.device):
        self._calls = calls
        self._run = run
        self.deltas = run.deltas
        self._device = device
        self._inside = False

    def __call__(self, name: str, forward: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        found = self._find(name)
        if found is not None and not self._inside and not self._run.is_own(found.call_index):
            output = self._run.remote_result(found.call_index, (args, kwargs))
            seed_stream(found.seed_after, 0, self._device)
            return output
        before, self._inside = self._inside, True
        try:
            return forward(*args, **kwargs)
        finally:
            self._inside = before

    def is_in_unit(self) -> bool:
        """Whether a unit of this stage runs."""
        return self._inside

    def _find(self, name: str) -> CheckpointedCall | None:
        found = [call for (unit, _), call in self._calls.items() if unit == name]
        return found[0] if len(found) == 1 else self._calls.get((name, torch.default_generator.initial_seed()))
