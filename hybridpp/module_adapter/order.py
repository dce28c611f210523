"""The order in which layers are nested around a module's own forward."""

from enum import StrEnum


class AdapterLayer(StrEnum):
    """What may be put around a module's forward; the value is how it is described."""

    COMPILE = "compiled forward"
    SHARD = "tensor-parallel shard"
    SHARDED_ARGUMENTS = "sharded arguments"
    GATHERED_INPUTS = "gathered inputs"
    LOCAL_WIDTH = "local width of arguments"
    SEQUENCE_GATHER = "gathered sequences"
    SEQUENCE_REPLICATED = "replicated sequences"
    SEQUENCE_SHARD = "sharded sequences"
    WEIGHT_GRADIENTS = "deferred weight gradients"
    DTYPE = "dtype boundary"
    FUNCTION_DTYPES = "dtypes of torch functions"
    LAYER_RNG = "RNG stream of a layer"
    GATHER_PARAMETERS = "gathered parameters"
    UNIT_RNG = "RNG stream of a unit"
    RECOMPUTE = "recomputation"
    STAGE = "stage"
    MODEL = "calls of the model"

    # That of an enum is a function in Python; wrappers look layers up thousands of times.
    __hash__ = str.__hash__


ORDER: tuple[AdapterLayer, ...] = (
    # Inside of collectives, which a compiler cannot look into.
    AdapterLayer.COMPILE,
    # Tensor parallelism: what a module computes on this rank's shard. The first four are on different modules.
    AdapterLayer.SHARD,
    AdapterLayer.SHARDED_ARGUMENTS,
    AdapterLayer.GATHERED_INPUTS,
    # Inside of what gathers sequences: a layer gets the full width of what the module was given, by its tensor.
    AdapterLayer.LOCAL_WIDTH,
    # Outside of the shard of experts, which sums gradients of inputs that all ranks have.
    AdapterLayer.SEQUENCE_GATHER,
    AdapterLayer.SEQUENCE_REPLICATED,
    AdapterLayer.SEQUENCE_SHARD,
    # Outside of the shard, of which it skips the forward where it defers: it does the shard's collectives itself.
    AdapterLayer.WEIGHT_GRADIENTS,
    # Outside of the weight gradients, which are deferred only where the input has the dtype of the weight; outside of
    # the collectives, which sum in the dtype of the module.
    AdapterLayer.DTYPE,
    AdapterLayer.FUNCTION_DTYPES,
    # Outside of the weight gradients, which would skip it: random numbers must not depend on the schedule.
    AdapterLayer.LAYER_RNG,
    # Inside the recomputation, which must gather again; inside the stage: a rank that does not run a module gathers
    # nothing.
    AdapterLayer.GATHER_PARAMETERS,
    # The last four commute, as far as their results go. Outside is what decides about more.
    AdapterLayer.UNIT_RNG,
    # Outside of sharded sequences, which a recomputed block gathers again.
    AdapterLayer.RECOMPUTE,
    AdapterLayer.STAGE,
    AdapterLayer.MODEL,
)
"""From the innermost layer, next to the module's own forward, to the outermost.

``tests/module_adapter/test_order.py`` says of every pair whether it can meet on a module; of those that can, it shows
that they commute or fail in the other order.
"""
