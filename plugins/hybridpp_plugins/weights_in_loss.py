"""Refuse losses of the script's own that read weights of which this rank has a shard, or none where no forward runs.

A penalty of weights, for example. See ``criterion_weights.py`` for those of criteria.
"""

from collections.abc import Callable, Collection, Iterator
from typing import Any

from torch import Tensor, nn

from hybridpp.errors import ConfigError
from hybridpp.nn.torch_private import DisableTorchFunctionSubclass
from hybridpp.partition import is_watched
from hybridpp.partition.containers import tensors_in
from hybridpp.pipeline import is_deferred_layer
from hybridpp.sharded_activations import is_collective
from hybridpp.tensor_parallel import sharding_of

_OUTPUT = "hybridpp.model_output"


class WeightsInLoss:
    """Looks at how a loss depends on weights: through what modules return, or directly.

    It follows the loss's graph from its end to what the model has returned.

    Args:
        model: that is boosted, on this rank.
        summed: parameters whose gradients are summed over the tensor-parallel ranks, by name.
        has_none: whether replicas divide weights, which are NaN where no forward runs (ZeRO 3).
    """

    def __init__(self, model: nn.Module, summed: Collection[str], *, has_none: bool):
        self._names = {id(parameter): name for name, parameter in model.named_parameters()}
        self._parts = {
            id(one): name for name, one in model.named_parameters() if sharding_of(one) is not None or name in summed
        }
        self._has_none = has_none
        # What losses that are not NaN have read.
        self._fine: set[frozenset[str]] = set()

    def around(self, inner: Callable[..., Any] | None) -> Callable[..., Any] | None:
        """A wrapper of the script's own calls of the model, which notes what they return; ``inner`` wraps inside."""
        if not self._parts:
            return inner

        def run(forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            result = inner(forward, args, kwargs) if inner else forward(*args, **kwargs)
            with DisableTorchFunctionSubclass():
                for output in tensors_in(result):
                    node: Any = output.grad_fn
                    if node is not None:
                        node.metadata[_OUTPUT] = True
            return result

        return run

    def check(self, loss: Tensor) -> None:
        """Refuse a loss of the script's own that depends on weights which are not whole here. Nothing is communicated.

        On a device, the host waits, once, for a loss that depends on what a hook has kept inside of a unit
        (``zero_stage=3``).

        Raises:
            ConfigError: it does; on every rank that has the same loss.
        """
        self.check_parts(loss)
        if self._has_none:
            read = frozenset(self._names[id(leaf)] for leaf in leaves_of(loss, is_watched) if id(leaf) in self._names)
            if read and read not in self._fine:
                # What a unit has computed of weights that were there is fine.
                if bool(loss.isnan().any()):
                    raise ConfigError(
                        f"the loss is nan, and depends on weights of the model ({min(read)}) by another way than "
                        "through what its forward returns, as with a penalty: with zero_stage=3 replicas divide "
                        "weights, which are nan where no forward runs. Let the forward return the penalty, compute "
                        "the loss and call booster.backward inside `with booster.unsharded(model):`, use "
                        "weight_decay of the optimizer, or zero_stage <= 2."
                    )
                self._fine.add(read)

    def check_parts(self, loss: Tensor) -> None:
        """Refuse a loss that depends on a shard, or on what ranks have summands of, by no layer that joins them.

        Raises:
            ConfigError: it does.
        """
        for leaf in leaves_of(loss, _is_output) if self._parts else ():
            if id(leaf) in self._parts:
                raise ConfigError(
                    f"the loss depends on weights of the model ({self._parts[id(leaf)]}) of which tensor-parallel "
                    "ranks have shards, or sum the gradients, by another way than through the layers that have them, "
                    "as with a penalty: it would be that of a shard, or count once for each rank. Let the model's "
                    "forward return the penalty, use weight_decay of the optimizer, leave these weights out, or use "
                    "tp_size=1."
                )


def leaves_of(loss: Tensor, is_end: Callable[[Any], bool]) -> Iterator[Tensor]:
    """The leaves that a loss depends on by ways without a node of autograd's graph for which ``is_end`` holds."""
    with DisableTorchFunctionSubclass():
        nodes, seen = [loss.grad_fn], set[Any]()
        while nodes:
            node = nodes.pop()
            if node is None or node in seen:
                continue
            seen.add(node)
            if hasattr(node, "variable"):
                yield node.variable
            elif not is_end(node):
                nodes += [edge for edge, _ in node.next_functions]


def _is_output(node: Any) -> bool:
    """Whether a node is of what a model returned, or joins what ranks have, or is a layer, which does that, too."""
    return _OUTPUT in node.metadata or is_collective(node) or is_deferred_layer(node)
