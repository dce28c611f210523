"""How a model's layers would be sharded, for estimates: searched as ``boost`` searches, or read off the model."""

from collections.abc import Callable

import torch
from torch import nn

from hybridpp.cluster import preserved_random_state
from hybridpp.config import ParallelConfig
from hybridpp.errors import ConfigError
from hybridpp.nn.linear import is_linear
from hybridpp.partition import find_units
from hybridpp.plan_search import (
    RunFormats,
    SequencePlan,
    hf_tp_plan,
    infer_embeddings_and_heads,
    large_tables,
    record_table_uses,
)
from hybridpp.sharding_plan import Plan, plan_from_patterns
from hybridpp_plugins.apply_sp import sequence_plan
from hybridpp_plugins.apply_tp import Sharding
from hybridpp_plugins.find_tp_plan import calls_of_blocks, find_tp_plan
from hybridpp_plugins.sample import Samples, find_samples
from hybridpp_plugins.solo_group import SoloGroup

# Elements of a block whose trials would take much longer than all the rest of an estimate, and gigabytes.
_LARGE_BLOCK = 2**25


def find_sharding(
    model: nn.Module,
    config: ParallelConfig,
    tp_size: int,
    shards_sequences: bool,
    sample: object = None,
    formats: RunFormats | None = None,
    smaller: Plan | None = None,
) -> Sharding:
    """The sharding of a model over tensor-parallel ranks.

    Of models with large blocks it is their own plan (transformers' ``_tp_plan``), where they have one for every linear
    layer of their blocks: the search finds the same for those, as it tries that plan first.

    Args:
        model: on the meta device.
        config: the user's plan; sizes do not count.
        tp_size: ranks.
        shards_sequences: whether sequences are sharded, too.
        sample: a batch; None: made from the model's configuration.
        formats: in which it will run; None: not known.
        smaller: the plan for a divisor of ``tp_size``, if it is known.

    Raises:
        ConfigError: no layer can be sharded.
    """
    # Each rank finds it for itself.
    control = SoloGroup(1)

    def samples() -> Samples:
        return find_samples(model, None, sample, torch.device("cpu"))

    with preserved_random_state(torch.device("cpu")):
        if config.tensor_parallel_plan is not None:
            plan = plan_from_patterns(model, config.tensor_parallel_plan, tp_size)
        else:
            plan = own_plan(model, tp_size, samples) or find_tp_plan(
                model, samples, tp_size, control, formats=formats, smaller=smaller
            )
        if not plan.spec.params:
            reasons = "; ".join(dict.fromkeys(plan.reasons.values())) or "its blocks have no such layers"
            raise ConfigError(
                f"tensor parallelism shards pairs of linear layers: none of {type(model).__name__} can be sharded over "
                f"{tp_size} ranks ({reasons}). Use another tp_size."
            )
        sequences = SequencePlan()
        if shards_sequences:
            sequences = sequence_plan(model, plan, samples, tp_size, control, formats=formats)
    return Sharding(plan, sequences)


def own_plan(model: nn.Module, tp_size: int, samples: Callable[[], Samples], large: int = _LARGE_BLOCK) -> Plan | None:
    """The plan that a model of large blocks has for itself; None: it must be searched.

    Args:
        model: on the meta device.
        tp_size: ranks.
        samples: gives batches that the model can be called with.
        large: elements of a large block.
    """
    blocks = find_units(model, 1).blocks
    modules = {name: model.get_submodule(name) for name in blocks}
    if max((sum(p.numel() for p in one.parameters()) for one in modules.values()), default=0) < large:
        return None
    kinds = hf_tp_plan(model).kinds
    inside = [
        f"{block}.{name}" for block, one in modules.items() for name, part in one.named_modules() if is_linear(part)
    ]
    # Experts are parameters, not layers: their plan is not so simple.
    held = {id(p) for name in inside for p in model.get_submodule(name).parameters()}
    others = [p for one in modules.values() for p in one.parameters() if id(p) not in held and p.dim() > 1]
    if others or not set(inside) <= set(kinds):
        return None
    with record_table_uses(large_tables(model, blocks)) as uses:
        calls_of_blocks(model, blocks, samples())
        ends = infer_embeddings_and_heads(uses)
    styles = {name: kinds[name].value for name in inside}
    return plan_from_patterns(model, {**styles, **ends.styles}, tp_size)
