"""Which blocks of a model run on shards of sequences, beside the plan that divides its layers."""

from collections.abc import Callable

from torch import nn

from hybridpp.cluster import Group
from hybridpp.errors import ConfigError
from hybridpp.partition import dissect
from hybridpp.tensor_parallel import Plan, SequencePlan, infer_sequence
from hybridpp_plugins.inferring import calls_of_blocks, check_agreed
from hybridpp_plugins.sample import Samples


def sequence_plan(
    model: nn.Module, plan: Plan, find_samples: Callable[[], Samples], size: int, control: Group
) -> SequencePlan:
    """How the model's blocks run on shards of sequences once the plan has divided their layers over ``size`` ranks.

    The model runs once, on a sample; on the meta device it is traced instead.

    Collective: all ranks; one small all-gather of host memory.

    Raises:
        ConfigError: no block can, or the ranks came to different results.
    """
    blocks = dissect(model, 1).blocks
    found = infer_sequence(model, blocks, calls_of_blocks(model, blocks, find_samples()), plan, size)
    check_agreed((sorted(map(str, found.blocks.items())), sorted(found.summed)), model, control)
    if not found.blocks:
        name, reason = next(iter(found.reasons.items()), ("", "it has no blocks"))
        raise ConfigError(
            f"sequence parallelism finds no block of {type(model).__name__} that can run on shards of sequences: "
            f"{name or 'all'}: {reason}. Leave enable_sequence_parallelism out."
        )
    return found
