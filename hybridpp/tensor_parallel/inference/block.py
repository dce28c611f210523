"""Find out how one block can be divided, by trying."""

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import islice, product
from typing import Any, TypeAlias

from torch import nn

from hybridpp.tensor_parallel.division import Division
from hybridpp.tensor_parallel.inference.attributes import indivisible
from hybridpp.tensor_parallel.inference.compare import compare
from hybridpp.tensor_parallel.inference.experts import divisions_of, expert_modules
from hybridpp.tensor_parallel.inference.flow import flow_of
from hybridpp.tensor_parallel.inference.groups import Group, groups_of
from hybridpp.tensor_parallel.inference.run import copy_of, made_up
from hybridpp.tensor_parallel.inference.tries import Found, Tries
from hybridpp.tensor_parallel.linear import layers_of

_MAX_TRIES = 160

SampleCall: TypeAlias = tuple[tuple[Any, ...], dict[str, Any]]
"""Positional and keyword arguments of a block's forward."""


@dataclass
class BlockPlan:
    """How one block is divided; names are inside the block.

    Attributes:
        styles: of the layers that are divided.
        division: the same, by parameters.
        summed: parameters that stay whole and whose gradients are sums of the ranks'.
        reasons: why a layer stays whole.
    """

    styles: dict[str, str] = field(default_factory=dict)
    division: Division = field(default_factory=Division)
    summed: frozenset[str] = frozenset()
    reasons: dict[str, str] = field(default_factory=dict)


class BlockSearch:
    """Tries to divide one block; the block itself is left as it was."""

    def __init__(self, block: nn.Module, call: SampleCall, tp_size: int):
        args, kwargs = call
        self._tp_size = tp_size
        self._layers = layers_of(block)
        self._whole = made_up(block, args, kwargs)
        self._block, self._call = self._whole.block, self._whole.call
        tensors = [x.detach().requires_grad_(x.requires_grad) for x in self._call.tensors]
        self._flow = flow_of(copy_of(self._block), self._layers, *self._call.arguments(tensors))
        for name in self._flow.otherwise:
            del self._layers[name]
        self._tries = Tries(self._block, self._call, self._layers, self._flow, tp_size)

    def run(self) -> BlockPlan:
        """The division with the most weights that gives the whole block's numbers."""
        groups, reasons = groups_of(self._flow, self._layers)
        reasons |= dict.fromkeys(self._flow.otherwise, "returns something else than one tensor")
        found: list[tuple[Group, Found]] = []
        taken: set[str] = set()
        likeliest_first = sorted(groups, key=self._likelihood, reverse=True)
        for tries_of, group in product((self._tries.of, self._tries.with_joins), likeliest_first):
            if group.layers & taken:
                continue
            division = self._first_right(islice(tries_of(group), _MAX_TRIES))
            if division is None:
                for name in (*group.columns, *group.rows):
                    reasons.setdefault(name, self._reason(group, name))
            else:
                found.append((group, division))
                taken |= group.layers
        for name in expert_modules(self._block):
            tries = divisions_of(self._block, name, self._tp_size)
            division = self._first_right(Found({name: "experts"}, one) for one in tries)
            if division is None:
                reasons[name] = "however its tensors are divided, the block gives other numbers"
            else:
                found.append((Group((name,), ()), division))
        plan = self._together(found)
        plan.reasons |= {name: reason for name, reason in reasons.items() if name not in taken}
        self._add_idle(plan)
        return plan

    def _together(self, found: list[tuple[Group, Found]]) -> BlockPlan:
        if not found:
            return BlockPlan()
        (_, first), *others = found
        plan = BlockPlan(first.styles, first.division, first.summed)
        for group, one in others:
            agreement = compare(self._whole, plan.division | one.division, self._tp_size)
            if agreement is None:
                plan.reasons |= dict.fromkeys(
                    (*group.columns, *group.rows), "can be divided, but not together with other layers"
                )
            else:
                plan.styles |= one.styles
                plan.division, plan.summed = agreement
        return plan

    def _add_idle(self, plan: BlockPlan) -> None:
        """Treat layers that did not run (experts that nothing was sent to) as those of their name but for a number."""
        examples = {(_pattern(name), self._layers[name]): name for name in plan.styles if name in self._layers}
        for name in set(self._layers) - self._flow.reads.keys():
            example = examples.get((_pattern(name), self._layers[name]))
            if example is None:
                continue
            old = plan.division
            like = {place: f"{name}{place.removeprefix(example)}" for place in (example, *old.parts, *old.first_only)}
            like = {place: new for place, new in like.items() if f"{place}.".startswith(f"{example}.")}
            plan.styles[name] = plan.styles[example]
            plan.reasons.pop(name, None)
            plan.division |= Division(
                {like[place]: part for place, part in old.parts.items() if place in like},
                enters=frozenset({name}) if example in old.enters else frozenset(),
                sums=frozenset({name}) if example in old.sums else frozenset(),
                first_only=frozenset(like[place] for place in old.first_only if place in like),
            )

    def _likelihood(self, group: Group) -> tuple[bool, int]:
        """Groups whose rows read nothing else come first, then those with the most weights."""
        reads = {source for row in group.rows for source in self._flow.layers_read_by(row)}
        size = sum(self._layers[name].num_outputs * self._layers[name].num_inputs for name in group.layers)
        return reads == set(group.columns), size

    def _reason(self, group: Group, name: str) -> str:
        number = indivisible(self._block, self._layers, group, self._tp_size)
        return number or f"divided with {_listed(group, name)}, the block gives other numbers"

    def _first_right(self, tries: Iterable[Found]) -> Found | None:
        for found in tries:
            agreement = compare(self._whole, found.division, self._tp_size)
            if agreement is not None:
                return Found(found.styles, *agreement)
        return None


def summed_modules(block: nn.Module, summed: frozenset[str]) -> list[str]:
    """Modules all of whose parameters have gradients that are sums of the ranks'."""
    found = []
    for name, module in block.named_modules():
        held = [f"{name}.{key}" if name else key for key in module._parameters if module._parameters[key] is not None]
        if held and summed.issuperset(held) and not any(module.children()):
            found.append(name)
    return found


def _pattern(name: str) -> str:
    return re.sub(r"\.\d+\.", ".*.", f".{name}.")


def _listed(group: Group, name: str) -> str:
    others = sorted(group.layers - {name})
    return ", ".join(others[:3]) + (f" and {len(others) - 3} more" if len(others) > 3 else "")
