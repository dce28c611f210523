"""Initialise the weights of a boosted model: each rank computes what it owns."""

import math
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path

from torch import Tensor

from hybridpp.checkpoint import CheckpointContents
from hybridpp.checkpoint.read import InMemory, StoredTensor
from hybridpp.cluster import preserved_random_state
from hybridpp.nn.initialization import Initializer, InitialValues
from hybridpp_plugins.apply_tp import placements
from hybridpp_plugins.engine import Engine
from hybridpp_plugins.weights import set_weights

# To prepare the model takes as long as it has tensors, so several small ones are made at a time.
_MAX_ELEMENTS = 2**24


def initialize_weights(engine: Engine, seed: int | None, initialize: Initializer | None) -> None:
    """Set all parameters and persistent buffers to initial values. Collective: all ranks."""

    def contents() -> CheckpointContents:
        shapes = _full_shapes(engine)
        values = InitialValues(
            engine.model,
            shapes,
            engine.original.dtypes,
            engine.progress.seed if seed is None else seed,
            initialize,
        )
        with values.prepared(), preserved_random_state(engine.device):
            values.check()

        def read(names: Collection[str]) -> Iterator[tuple[str, StoredTensor]]:
            for chunk in _chunks(names, shapes):
                with values.prepared(), preserved_random_state(engine.device):
                    made = {name: values.value(name) for name in chunk}
                while made:
                    name, value = made.popitem()
                    yield name, InMemory(value)

        return CheckpointContents(shapes, read)

    set_weights(engine, contents, Path(), strict=True, what="initialising the weights")


def _chunks(names: Collection[str], shapes: Mapping[str, tuple[int, ...]]) -> Iterator[list[str]]:
    """Names of tensors that are made together: one large one, or several small ones."""
    chunk: list[str] = []
    size = 0
    for name in names:
        if chunk and size + math.prod(shapes[name]) > _MAX_ELEMENTS:
            yield chunk
            chunk, size = [], 0
        chunk.append(name)
        size += math.prod(shapes[name])
    if chunk:
        yield chunk


def _full_shapes(engine: Engine) -> dict[str, tuple[int, ...]]:
    """The shapes of the complete tensors of which this rank owns something, by name."""
    with engine.weights.internal():
        state = engine.model.state_dict()
    sharded, aliases = placements(engine.model), engine.original.aliases
    return {
        name: sharded[name].full_shape if name in sharded else tuple(tensor.shape)
        for name, tensor in state.items()
        if name not in aliases and isinstance(tensor, Tensor)
    }
