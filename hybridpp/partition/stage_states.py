"""Attributes that container code leaves for the next forward, on ranks that run several stages: each has its own."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import nn

from hybridpp.nn import walk
from hybridpp.nn.snapshot import MISSING, put_entry
from hybridpp.partition.left_state import LeftKey
from hybridpp.partition.module_outputs import attributes_now


class StageStates:
    """What each stage of a rank has left in attributes of the model, and finds there in its next forward.

    Container code runs once for each stage of a rank. With one stage for each rank it would find what the same stage
    has left, on the micro-batch before; so it does here. Between forwards the attributes are those of the rank's last
    stage. What a script sets them to then, all stages find.

    Args:
        model: of which the rank has stages.
        stages: of the rank.
    """

    def __init__(self, model: nn.Module, stages: Sequence[int]):
        self._model = model
        self._last = max(stages)
        # By attribute: what was there before the first forward, as of stage None, and what each stage has left.
        self._values: dict[LeftKey, dict[int | None, Any]] = {}
        self._put: dict[LeftKey, Any] = {}

    @contextmanager
    def of_stage(self, stage: int, keys: Iterable[LeftKey]) -> Iterator[None]:
        """Inside, the attributes are those of a stage.

        Args:
            stage: whose forward runs inside.
            keys: of attributes that it may leave; the others are known from forwards before.
        """
        for key in dict.fromkeys((*self._values, *keys)):
            now = self._now(key)
            if key not in self._values or now is not self._put[key]:
                self._values[key] = {None: now}
            values = self._values[key]
            self._set(key, values.get(stage, values[None]))
        try:
            yield
        finally:
            for key, values in self._values.items():
                values[stage] = self._now(key)
                self._set(key, values.get(self._last, values[stage]))

    def _now(self, key: LeftKey) -> Any:
        return attributes_now(walk.submodule(self._model, key[0])).get(key[1], MISSING)

    def _set(self, key: LeftKey, value: Any) -> None:
        put_entry(vars(walk.submodule(self._model, key[0])), key[1], value)
        self._put[key] = value
