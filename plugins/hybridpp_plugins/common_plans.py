"""Searched plans that jobs of in-process ranks have in common: of equal models with equal samples, one is searched."""

from collections.abc import Callable, Hashable
from contextvars import copy_context
from typing import Any, NamedTuple, TypeVar

import torch
from torch import nn

from hybridpp.cluster import CommonResults
from hybridpp.nn.structure import ObjectChanges, PlainChange, Structure, repeat_changes
from hybridpp.partition import compiled_parts, has_global_hooks, surroundings
from hybridpp_plugins.sample import Samples

_T = TypeVar("_T")


class _CommonPlan(NamedTuple):
    """A plan, and what the model's forward changed in objects that it refers to; None: that cannot be repeated."""

    plan: Any
    changes: list[PlainChange] | None


class CommonPlans:
    """Plans for models that earlier jobs in this process have searched.

    Their key has everything that a search can see, and so the values of the weights, too: the blocks are verified on
    what the model's own forward passes to them.

    Args:
        results: of this rank and the others; None: each search is made.
    """

    def __init__(self, results: CommonResults | None):
        self._results = results

    def get(self, settings: Hashable, model: nn.Module, samples: Samples, search: Callable[[], _T]) -> _T:
        """The plan that ``search`` finds, or that a search with equal settings has found of an equal model.

        Args:
            settings: what else ``search`` depends on.
            model: complete, and as the script made it.
            samples: that the model is called with.
            search: leaves the model as it was.
        """
        # An object of this library hides a compiled forward.
        if self._results is None or compiled_parts(model):
            return search()
        structure = Structure()
        try:
            described = structure.of([model, samples.kinds, dict(copy_context())])
        except RecursionError:
            return search()
        modes = torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.get_float32_matmul_precision()
        own: list[_CommonPlan] = []

        def searched() -> _CommonPlan:
            changes = ObjectChanges(structure.changeable)
            found = search()
            own.append(_CommonPlan(found, changes.plain()))
            return own[0]

        common = self._results.get(
            (settings, samples.are_made, described, modes, surroundings()),
            searched,
            lambda made: made.changes is not None,
            is_of_run=not structure.is_lasting or has_global_hooks(),
        )
        if not own:
            repeat_changes(structure.changeable, common.changes or ())
        plan: _T = common.plan
        return plan
