"""What the model's calls get beside a micro-batch's inputs, and plans that hold while something cached grows."""

from collections.abc import Callable, Hashable, Mapping
from typing import Any, Protocol

from torch import Tensor

from hybridpp.partition.plan_cache import Plans

# Of each kind of key; the first are dropped.
_MAX_PLANS = 256


class CallOptions(Protocol):
    """Keyword arguments that are no inputs, and what becomes of the result."""

    def keywords(self, *, is_trace: bool) -> dict[str, Any]:
        """The keyword arguments of a call of the model; a trace must leave nothing behind."""

    def key(self, inputs: Mapping[str, Any]) -> Hashable:
        """Equal for calls whose plans are equal for certain."""

    def growth_key(self, inputs: Mapping[str, Any]) -> Hashable | None:
        """Equal for calls whose plans are likely to be equal, because they differ in a length only; None: none are."""

    def result(self, result: Any) -> Any:
        """The model's result, as it is sent."""


class GrowingPlans:
    """Plans of calls with options: after two of one ``growth_key`` with equal plans, further ones are not traced."""

    def __init__(self) -> None:
        self._by_key: dict[Hashable, Plans] = {}
        self._latest: dict[Hashable, Plans] = {}
        self._settled: dict[Hashable, Plans] = {}

    def get(self, options: CallOptions, inputs: Mapping[str, Any], make: Callable[[], Plans]) -> Plans:
        """The plans of a call; ``make`` traces it."""
        growth, key = options.growth_key(inputs), options.key(inputs)
        if growth in self._settled:
            return self._settled[growth]
        if key in self._by_key:
            return self._by_key[key]
        self._by_key[key] = plans = make()
        if growth is not None:
            if self._latest.get(growth) == plans:
                self._settled[growth] = plans
            self._latest[growth] = plans
        for kept in (self._by_key, self._latest, self._settled):
            while len(kept) > _MAX_PLANS:
                del kept[next(iter(kept))]
        return plans


def shapes_of(inputs: Mapping[str, Any], growing: int | None = None) -> tuple[tuple[str, tuple[int | None, ...]], ...]:
    """The shapes of tensors by name, with None for dimensions of size ``growing``."""
    return tuple(
        (name, tuple(None if size == growing else size for size in value.shape))
        for name, value in inputs.items()
        if isinstance(value, Tensor)
    )
