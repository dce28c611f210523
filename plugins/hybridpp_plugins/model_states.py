"""``state_dict`` and ``load_state_dict`` of a boosted model, of which this rank has a part."""

from collections import defaultdict
from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import Any, TypeVar

from torch import Tensor, nn

from hybridpp.errors import ConfigError
from hybridpp.module_adapter import ModuleAdapter
from hybridpp.nn import walk
from hybridpp.nn.names import qualified
from hybridpp.nn.torch_private import buffers_of, parameters_of
from hybridpp.tensor_parallel import sharding_of
from hybridpp_plugins.trained_weights import TrainedWeights

_T = TypeVar("_T", bound=Tensor)


class ModelStates:
    """Takes this rank's part of states of the complete model, and refuses both calls while weights are not there.

    A rank's own state is loaded as torch does. All of it is so for the model's modules, too.

    Args:
        model: that is boosted, on this rank.
        complete: the names of all tensors in the state of the complete model.
        tp_rank: of this rank.
        weights: of the model; None: of a copy, which has all weights of this rank.
    """

    def __init__(self, model: nn.Module, complete: Collection[str], tp_rank: int, weights: TrainedWeights | None):
        self._complete, self._tp_rank, self._weights = tuple(complete), tp_rank, weights
        self._direct: defaultdict[str, list[str]] = defaultdict(list)
        for name in complete:
            path, _, last = name.rpartition(".")
            self._direct[path].append(last)
        self._sharded = None if weights is None else weights.sharded
        named = model.named_parameters(remove_duplicate=False)
        self._shardings = {name: found for name, one in named if (found := sharding_of(one)) is not None}

    def __deepcopy__(self, memo: dict[int, Any]) -> "ModelStates":
        """Of a copy of the model, which does not keep the original alive."""
        copied = ModelStates(nn.Module(), self._complete, self._tp_rank, None)
        copied._shardings = self._shardings
        return copied

    def put(self, adapter: ModuleAdapter) -> None:
        """Put this on a model, and on its modules that have anything of its state."""
        holders = {""}
        for name in self._direct:
            while name:
                holders.add(name)
                name = name.rpartition(".")[0]
        for name, module in walk.named_modules(adapter.model):
            if name not in holders:
                continue
            loading = module.register_load_state_dict_pre_hook(  # type: ignore[no-untyped-call]  # torch
                partial(self._before_loading, name)
            )
            adapter.hooked(module, "hook that takes a rank's part of a state", loading)
            if self._sharded is not None:
                reading = module.register_state_dict_pre_hook(  # type: ignore[no-untyped-call]  # torch
                    self._before_reading
                )
                adapter.hooked(module, "hook that refuses state_dict", reading)

    def _before_reading(self, module: nn.Module, *_: Any) -> None:
        if self._weights is not None and walk.parameters(module):
            self._weights.check_readable("state_dict")

    def _before_loading(self, path: str, module: nn.Module, state: dict[str, Any], prefix: str, *others: Any) -> None:
        """Change a state that a module loads, as torch's hooks may; ``path``: the module's name."""
        _, _, missing, *_ = others  # after metadata and strict
        if (
            prefix
        ):  # it was done for the module that the script loads; batch normalisation adds a number that is missing
            for name in self._direct.get(path, ()):
                if parameters_of(module).get(name) is None and buffers_of(module).get(name) is None:
                    state.pop(prefix + name, None)
            return
        parameters = _named(module, parameters_of)
        for name in sorted(parameters.keys() & state.keys()):
            if self._sharded is not None and self._sharded.absent_part(parameters[name]) is not None:
                raise ConfigError(
                    f"load_state_dict writes to weights ({name}) of which each replica holds a part: got zero_stage=3. "
                    "Use `with booster.unsharded(model):` on every rank around it, or booster.load_model(model, path)."
                )
        start = f"{path}." if path else ""
        here = parameters.keys() | _named(module, buffers_of).keys()
        names = [name.removeprefix(start) for name in self._complete if name.startswith(start)]
        elsewhere = set(names) - here
        if not elsewhere.isdisjoint(state):
            # A state of the complete module.
            missing += [name for name in names if name in elsewhere - state.keys()]
            for name in elsewhere & state.keys():
                del state[name]
        for name, value in state.items():
            sharding = self._shardings.get(start + name)
            if sharding is not None and isinstance(value, Tensor) and tuple(value.shape) == tuple(sharding.full_shape):
                state[name] = sharding.take(value, self._tp_rank, allow_view=True)


def _named(module: nn.Module, tensors_of: Callable[[nn.Module], Mapping[str, _T | None]]) -> dict[str, _T]:
    """What this rank has of a module, by all names."""
    return {
        qualified(path, key): one
        for path, inner in module.named_modules(remove_duplicate=False)
        for key, one in tensors_of(inner).items()
        if one is not None
    }
