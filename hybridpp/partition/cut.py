"""Choose where a model is cut: as the user requests, or by balance."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from torch import nn

from hybridpp.config import PartitionConfig
from hybridpp.errors import PartitionError
from hybridpp.partition.balance import balance
from hybridpp.partition.calls import Trace, UnitCall
from hybridpp.partition.cut_search import BudgetedCutSearch, Segments
from hybridpp.partition.memory import MemoryBudget
from hybridpp.partition.plan import CutPoint, assign_stages, block_ends, cut_at_counts, names_by_stage
from hybridpp.partition.requested_cut import requested_cut

UnitCost = Callable[[UnitCall], float]


class CutCriteria(NamedTuple):
    """Criteria by which cuts are compared.

    Attributes:
        costs: of a unit call, in any unit.
        held: memory of the stages and its limit; None: no limit.
    """

    costs: UnitCost
    held: MemoryBudget | None = None


def choose_cut(
    model: nn.Module,
    trace: Trace,
    blocks: Sequence[str],
    num_stages: int,
    config: PartitionConfig,
    criteria: CutCriteria,
) -> tuple[CutPoint, ...]:
    """The cut points of ``num_stages`` stages.

    In order of precedence: the counts of ``config.layers_per_stage``; the names of ``config.split_points``; the split
    points and stage numbers set on modules (see ``annotations.py``); else the cut that minimises the cost of the most
    expensive stage.

    Args:
        model: the model, with its annotations.
        trace: of the forward.
        blocks: names of the units that a balanced cut may follow.
        num_stages: number of stages.
        config: the user's settings.
        criteria: unit costs, and what a rank may hold.

    Raises:
        PartitionError: the requested cut does not give ``num_stages`` stages, does not follow the forward, or exceeds
            the memory limit of a rank.
    """
    requested = requested_cut(model, trace, blocks, num_stages, config)
    if requested is None:
        return _balanced(model, trace, blocks, num_stages, criteria)
    if criteria.held is not None:
        criteria.held.check(names_by_stage(trace, assign_stages(trace, requested), tuple(criteria.held.sizes)))
    return requested


def _balanced(
    model: nn.Module, trace: Trace, blocks: Sequence[str], num_stages: int, criteria: CutCriteria
) -> tuple[CutPoint, ...]:
    """What runs before a block counts to it, what runs after the last one to the last."""
    ends = block_ends(trace, blocks)
    if not ends:
        listed = ", ".join(blocks) or "none"
        raise PartitionError(
            f"a model is cut between blocks that its forward calls: {type(model).__name__} has {len(blocks)} "
            f"({listed}) and calls none, as block(...). Name modules that it calls in split_points, or use pp_size=1."
        )
    if len(ends) < num_stages:
        found = ", ".join(trace.calls[end].name for end in ends)
        raise PartitionError(
            f"a pipeline stage needs at least one block: {type(model).__name__} runs {len(ends)} ({found}), "
            f"for {num_stages} stages (pp_size x num_model_chunks). Use {len(ends)} or fewer."
        )
    starts = [0, *(end + 1 for end in ends)]
    sums = [sum(map(criteria.costs, trace.calls[start : end + 1])) for start, end in zip(starts, ends, strict=False)]
    sums[-1] += sum(map(criteria.costs, trace.calls[starts[-1] :]))
    held = criteria.held
    if held is None or held.limit is None:
        return cut_at_counts(trace, ends, balance(sums, num_stages))
    segments = Segments(trace, ends, tuple(held.sizes))
    return cut_at_counts(trace, ends, BudgetedCutSearch(sums, segments, held).find())
