"""Cuts that the user requests: by counts, by names, or by numbers and marks on modules (see ``annotations.py``)."""

from collections.abc import Mapping, Sequence
from itertools import permutations
from typing import Any, NamedTuple

from torch import nn

from hybridpp.config import PartitionConfig
from hybridpp.errors import PartitionError, some_of
from hybridpp.nn import walk
from hybridpp.partition.balance import balance
from hybridpp.partition.calls import Trace
from hybridpp.partition.plan import CutPoint, block_ends, cut_after, cut_at_counts


def requested_cut(
    model: nn.Module, trace: Trace, blocks: Sequence[str], num_stages: int, config: PartitionConfig
) -> tuple[CutPoint, ...] | None:
    """The cut that the user requests in ``config`` or on modules; None: there is none.

    Raises:
        PartitionError: it does not give ``num_stages`` stages, or does not follow the forward.
    """
    if config.layers_per_stage is not None:
        return _by_counts(trace, blocks, num_stages, config.layers_per_stage)
    on_modules = _marks_of(model)
    points, stages = config.split_points or on_modules.split_points, on_modules.stages()
    if points and stages:
        raise PartitionError(
            "give either split points or stage numbers: got split points at "
            f"{', '.join(points)} and pipeline_stage on {', '.join(stages)}. Remove one kind."
        )
    if points:
        return _by_names(trace, num_stages, points)
    if stages:
        return _by_stage_numbers(trace, num_stages, stages)
    return None


def is_requested(model: nn.Module, config: PartitionConfig) -> bool:
    """Whether the user requests a cut."""
    if config.layers_per_stage or config.split_points:
        return True
    on_modules = _marks_of(model)
    return bool(on_modules.split_points or on_modules.stages())


class _Marks(NamedTuple):
    """What is set on modules, by their names.

    Attributes:
        split_points: set by ``annotate_split_points``: ``"before"`` or ``"after"``.
        pipeline_stages: the attributes ``pipeline_stage``; they apply to the modules inside, too.
    """

    split_points: dict[str, str]
    pipeline_stages: dict[str, Any]

    def stages(self) -> dict[str, int]:
        """The stages.

        Raises:
            PartitionError: a stage is not an integer.
        """
        for name, stage in self.pipeline_stages.items():
            if not isinstance(stage, int):
                raise PartitionError(
                    f"pipeline_stage must be the number of a stage, from 0: got {stage!r} on {name!r}."
                )
        return self.pipeline_stages


def _marks_of(model: nn.Module) -> _Marks:
    found = _Marks({}, {})
    for name, module in walk.named_modules(model):
        # Not getattr: a property of the class with this name is no annotation.
        attributes = vars(module)
        if attributes.get("split_point") is not None:
            found.split_points[name] = attributes["split_point"]
        if name and attributes.get("pipeline_stage") is not None:
            found.pipeline_stages[name] = attributes["pipeline_stage"]
    return found


def _on_one_stage(model: nn.Module, marked: Mapping[str, int]) -> list[str]:
    """The outermost annotated modules with one stage; lists are excluded, because they have no forward."""
    on_one_stage = [
        name
        for name in marked
        if len({marked[inner] for inner in marked if _within(inner, name)}) == 1
        and not isinstance(walk.submodule(model, name), nn.ModuleList | nn.ModuleDict)
    ]
    return [name for name in on_one_stage if not any(_within(name, outer) for outer in on_one_stage if outer != name)]


def _within(inner: str, outer: str) -> bool:
    return f"{inner}.".startswith(f"{outer}.")


def check_single_stage(config: PartitionConfig) -> None:
    """Refuse settings that request a cut if there is one stage.

    Raises:
        PartitionError: they do.
    """
    num_stages = len(config.layers_per_stage or [0])
    if config.split_points or num_stages > 1:
        setting = f"split_points={dict(config.split_points)}" if config.split_points else ""
        raise PartitionError(
            "one stage is not cut: got "
            f"{setting or f'layers_per_stage={list(config.layers_per_stage or [])}'} with pp_size=1. Leave it out, or "
            "raise pp_size."
        )


def named_blocks(model: nn.Module, config: PartitionConfig) -> tuple[str, ...]:
    """Modules that the user names, which must be units of their own."""
    if config.layers_per_stage is not None:
        return ()
    if config.split_points:
        return tuple(config.split_points)
    on_modules = _marks_of(model)
    return tuple(on_modules.split_points or _on_one_stage(model, on_modules.stages()))


def _by_counts(trace: Trace, blocks: Sequence[str], num_stages: int, counts: Sequence[int]) -> tuple[CutPoint, ...]:
    ends = block_ends(trace, blocks)
    if len(counts) != num_stages or sum(counts) != len(ends):
        raise PartitionError(
            f"layers_per_stage needs one count per stage, and all {len(ends)} blocks in the sum: got {some_of(counts)} "
            f"(sum {sum(counts)}) for {num_stages} stages. "
            f"Balanced would be {list(balance([1.0] * len(ends), num_stages))}."
        )
    return cut_at_counts(trace, ends, counts)


def _by_names(trace: Trace, num_stages: int, points: Mapping[str, str]) -> tuple[CutPoint, ...]:
    ends = []
    for inner, outer in permutations(points, 2):
        if _within(inner, outer):
            raise PartitionError(
                f"a module and a module inside it cannot both be split points: got {outer!r} and {inner!r}. Remove one."
            )
    for name, side in points.items():
        called = [index for index, call in enumerate(trace.calls) if call.name == name]
        if not called:
            raise PartitionError(f"the forward does not call {name!r}, so it cannot be cut there. Name another module.")
        index = called[0] - 1 if side == "before" else called[-1]
        if not 0 <= index < len(trace.calls) - 1:
            raise PartitionError(f"nothing runs {side} {name!r}, so a cut there leaves a stage empty. Remove it.")
        ends.append(index)
    if len(set(ends)) != num_stages - 1:
        raise PartitionError(
            f"split points give one stage more than there are points: got {len(set(ends))} different ones "
            f"({', '.join(f'{side} {name}' for name, side in points.items())}), {num_stages} stages. "
            f"Give {num_stages - 1}, or use pp_size={len(set(ends)) + 1}."
        )
    return cut_after(trace, sorted(ends))


def _by_stage_numbers(trace: Trace, num_stages: int, numbers: Mapping[str, int]) -> tuple[CutPoint, ...]:
    if sorted(set(numbers.values())) != list(range(num_stages)):
        raise PartitionError(
            f"pipeline_stage must use every stage from 0 to {num_stages - 1}: got {sorted(set(numbers.values()))}. "
            f"Set them, or use pp_size={max(numbers.values()) + 1}."
        )
    last_of: dict[int, int] = {}
    latest = 0
    for index, call in enumerate(trace.calls):
        around = [name for name in numbers if _within(call.name, name)]
        if not around:
            continue
        stage = numbers[max(around, key=len)]
        if stage < latest:
            raise PartitionError(
                f"pipeline_stage must not decrease along the forward: {call.name!r} has {stage} and runs after a "
                f"module of stage {latest}. Set it to {latest} or more."
            )
        latest = stage
        last_of[stage] = index
    missing = [stage for stage in range(num_stages) if stage not in last_of]
    if missing:
        raise PartitionError(f"the forward calls no module of stage {missing[0]}. Set pipeline_stage on one it calls.")
    return cut_after(trace, [last_of[stage] for stage in range(num_stages - 1)])
