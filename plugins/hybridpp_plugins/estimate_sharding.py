"""How a model's layers would be sharded, for estimates: searched as ``boost`` searches, or read off the model."""

from collections.abc import Callable
from functools import cached_property

import torch
from torch import nn

from hybridpp.cluster import preserved_random_state
from hybridpp.config import ParallelConfig
from hybridpp.errors import ConfigError
from hybridpp.nn.linear import is_linear
from hybridpp.partition import find_units
from hybridpp.plan_search import NarrowCopies, RunFormats, SequencePlan, hf_tp_plan
from hybridpp.sharding_plan import Plan, plan_from_patterns
from hybridpp_plugins.apply_sp import sequence_plan
from hybridpp_plugins.apply_tp import Sharding
from hybridpp_plugins.find_tp_plan import WatchedBlocks, plan_of_blocks, watch_blocks
from hybridpp_plugins.sample import Samples, find_samples
from hybridpp_plugins.solo_group import SoloGroup

_CPU = torch.device("cpu")
# Elements of a block whose trials would take much longer than all the rest of an estimate, and gigabytes.
_LARGE_BLOCK = 2**25


# What hosts have: narrow copies of blocks for so many ranks do for all smaller numbers of them.
_MOST_RANKS = 8


class ShardingSearch:
    """Finds how one model is sharded over several numbers of tensor-parallel ranks.

    Of models with large blocks it is their own plan (transformers' ``_tp_plan``), where they have one for every linear
    layer of their blocks: the search finds the same for those, as it tries that plan first.

    Args:
        model: on the meta device.
        config: the user's plan; sizes do not count.
        sample: a batch; None: made from the model's configuration.
        formats: in which it will run; None: not known.
    """

    def __init__(
        self, model: nn.Module, config: ParallelConfig, sample: object = None, formats: RunFormats | None = None
    ):
        self._model, self._config, self._sample, self._formats = model, config, sample, formats
        self._plans: dict[int, Plan] = {}
        self._copies = NarrowCopies(_MOST_RANKS)

    def find(self, tp_size: int, shards_sequences: bool) -> Sharding:
        """The sharding over ``tp_size`` ranks, of sequences, too, with ``shards_sequences``.

        Raises:
            ConfigError: no layer can be sharded.
        """
        with preserved_random_state(_CPU):
            plan = self._plans[tp_size] = self._plan(tp_size)
            if not plan.spec.params:
                reasons = "; ".join(dict.fromkeys(plan.reasons.values())) or "its blocks have no such layers"
                raise ConfigError(
                    f"tensor parallelism shards pairs of linear layers: none of {type(self._model).__name__} can be "
                    f"sharded over {tp_size} ranks ({reasons}). Use another tp_size."
                )
            sequences = SequencePlan()
            if shards_sequences:
                # Each rank finds it for itself.
                control = SoloGroup(1)
                sequences = sequence_plan(self._model, plan, self._samples, tp_size, control, formats=self._formats)
        return Sharding(plan, sequences)

    def _plan(self, tp_size: int) -> Plan:
        model = self._model
        if self._config.tensor_parallel_plan is not None:
            return plan_from_patterns(model, self._config.tensor_parallel_plan, tp_size)
        if (own := own_plan(model, tp_size, lambda: self._watched)) is not None:
            return own
        # What fewer ranks could not share need not be tried.
        smaller = max((one for one in self._plans if tp_size % one == 0), default=None)
        found = None if smaller is None else self._plans[smaller]
        return plan_of_blocks(model, self._watched, tp_size, self._formats, found, self._copies)

    def _samples(self) -> Samples:
        return find_samples(self._model, None, self._sample, _CPU)

    @cached_property
    def _watched(self) -> WatchedBlocks:
        return watch_blocks(self._model, self._samples())


def own_plan(
    model: nn.Module, tp_size: int, watch: Callable[[], WatchedBlocks], large: int = _LARGE_BLOCK
) -> Plan | None:
    """The plan that a model of large blocks has for itself; None: it must be searched.

    Args:
        model: on the meta device.
        tp_size: ranks.
        watch: gives what a run shows of its blocks.
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
    styles = {name: kinds[name].value for name in inside}
    return plan_from_patterns(model, {**styles, **watch().ends.styles}, tp_size)
