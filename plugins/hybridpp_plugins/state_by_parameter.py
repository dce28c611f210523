"""An optimizer's state, also by the parameters of the model where it updates other tensors."""

from collections.abc import Iterator, MutableMapping
from typing import Any

from hybridpp.data_parallel import UpdateTarget
from hybridpp.errors import ConfigError


class StateByParameter(MutableMapping[Any, Any]):
    """The state of the wrapped optimizer. A parameter of the model stands for the fp32 copy that is updated for it.

    Args:
        state: of the wrapped optimizer, by what it updates.
        target: what is updated: parameters, copies of them, or parts.
    """

    def __init__(self, state: MutableMapping[Any, Any], target: UpdateTarget):
        self._state, self._target = state, target

    def _key(self, key: Any) -> Any:
        name = self._target.names.get(id(key))
        if name is None:
            return key
        if self._target.is_divided:
            raise ConfigError(
                f"this rank has no state of all of {name!r}: with ZeRO, replicas divide what the optimizer updates. "
                "Take the tensors of optimizer.param_groups, which are the rank's parts and have its state, or "
                "optimizer.state_dict(); booster.save_optimizer writes the complete state."
            )
        return self._target.tensors[name]

    def __getitem__(self, key: Any) -> Any:
        return self._state[self._key(key)]

    def get(self, key: Any, default: Any = None) -> Any:
        """The state; ``default`` where there is none: a ``defaultdict``, as torch's is, would make it."""
        return self._state.get(self._key(key), default)

    def __setitem__(self, key: Any, value: Any) -> None:
        self._state[self._key(key)] = value

    def __delitem__(self, key: Any) -> None:
        del self._state[self._key(key)]

    def __contains__(self, key: object) -> bool:
        return self._key(key) in self._state

    def __iter__(self) -> Iterator[Any]:
        return iter(self._state)

    def __len__(self) -> int:
        return len(self._state)

    def __repr__(self) -> str:
        return repr(self._state)
