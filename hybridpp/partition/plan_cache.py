"""Cache of stage plans by input signature, so that each signature is traced once."""

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from hybridpp.nn.torch_private import pytree
from hybridpp.partition.plan import StagePlan

Plans = Mapping[int, StagePlan]

# Number of cached signatures; the least recently used is dropped.
_MAX_PLANS = 256


class PlanCache:
    """The plans of this rank's stages, by structure, shapes and values of the model's inputs."""

    def __init__(self) -> None:
        self._plans: dict[Any, Plans] = {}

    def get(self, args: tuple[Any, ...], kwargs: dict[str, Any], training: bool, make: Callable[[], Plans]) -> Plans:
        """The plans for such inputs; ``make`` creates them if there are none yet."""
        signature = _signature(args, kwargs, training)
        plans = self._plans.pop(signature, None)
        self._plans[signature] = plans = make() if plans is None else plans  # now the most recent
        while len(self._plans) > _MAX_PLANS:
            del self._plans[next(iter(self._plans))]
        return plans


def _signature(args: tuple[Any, ...], kwargs: dict[str, Any], training: bool) -> Any:
    leaves, tree = pytree.tree_flatten((args, kwargs))
    return tree, training, tuple(_leaf_signature(leaf) for leaf in leaves)


def _leaf_signature(leaf: Any) -> Any:
    if isinstance(leaf, Tensor):
        return leaf.shape, leaf.dtype
    try:
        hash(leaf)
    except TypeError:
        return repr(leaf)
    # 1, True and 1.0 are equal, but a model may distinguish them.
    return type(leaf), leaf
