"""Run a divided block on shards of sequences, on in-process ranks, and compare it with the whole one by number."""

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from hybridpp.cluster import Loopback, current_world
from hybridpp.tensor_parallel.infer_compare import close, largest
from hybridpp.tensor_parallel.infer_run import Outcome, Whole
from hybridpp.tensor_parallel.placement import Placement, placement_of
from hybridpp.tensor_parallel.plan import Plan
from hybridpp.tensor_parallel.sequence import SequenceBlock, run_on_shards
from hybridpp.tensor_parallel.shard import shard


def summed_on_shards(whole: Whole, plan: Plan, sequence: SequenceBlock, tp_size: int) -> frozenset[str] | None:
    """The whole parameters whose gradients are sums of the ranks', if a block runs on shards; None: it cannot.

    Args:
        whole: the block, with what it gives.
        plan: how it is divided; names are inside of it.
        sequence: how it would run.
        tp_size: over how many ranks.
    """

    def run() -> tuple[Outcome, dict[str, Placement | None], dict[tuple[str, str], Tensor]]:
        group = current_world().split([range(tp_size)])
        assert group is not None
        block = copy.deepcopy(whole.block)
        run_on_shards(block, "", sequence, shard(block, plan, group))
        outcome = Outcome(block, whole.call, whole.outcome)
        return outcome, {name: placement_of(held) for name, held in block.named_parameters()}, _left(block)

    try:
        ranks = Loopback(tp_size).run(run)
    except Exception:
        return None  # whatever a wrong guess makes of a block
    expected, left = whole.outcome, _left(whole.block)
    same = all(close(one.results[n], x) for one, _, _ in ranks for n, x in expected.results.items())
    same = same and all(key in own and close(own[key], x) for _, _, own in ranks for key, x in left.items())
    if not same or not all(one.gradients for one, _, _ in ranks):
        return None
    return _summed_in(expected, [one for one, _, _ in ranks], ranks[0][1])


def _summed_in(expected: Outcome, ranks: list[Outcome], lies: Mapping[str, Placement | None]) -> frozenset[str] | None:
    scale = max((largest(gradient) for gradient in expected.gradients.values()), default=0.0)
    summed = set()
    for name, gradient in expected.gradients.items():
        found = [rank.gradients[name] for rank in ranks]
        placement = lies.get(name) if isinstance(name, str) else None
        if placement is not None:
            if not close(placement.join(_with_copies(found, placement)), gradient, scale):
                return None
        elif not all(close(part, gradient, scale) for part in found):
            if not isinstance(name, str) or not close(torch.stack(found).sum(0), gradient, scale):
                return None
            summed.add(name)
    return frozenset(summed)


def _with_copies(found: list[Tensor], placement: Placement) -> list[Tensor]:
    """Each rank's gradient, with those of the neighbours where they have the same part."""
    sums = [gradient.clone() for gradient in found]
    for ranks in zip(*map(placement.copied, sums), strict=True):
        copies = ranks[0][0]
        for first in range(0, len(ranks), copies):
            total = torch.stack([view for _, view in ranks[first : first + copies]]).sum(0)
            for _, view in ranks[first : first + copies]:
                view.copy_(total)
    return sums


def _left(block: nn.Module) -> dict[tuple[str, str], Tensor]:
    """What a run has left on modules: a loss to be added, say."""
    return {
        (name, key): value.detach()
        for name, module in block.named_modules()
        for key, value in vars(module).items()
        if isinstance(value, Tensor) and value.is_floating_point()
    }


class _Draws(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch
    """Notes the shapes of random numbers."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch
        self.shapes: list[tuple[int, ...]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if torch.Tag.nondeterministic_seeded in func.tags:
            self.shapes += [tuple(x.shape) for x in pytree.tree_leaves(result) if isinstance(x, Tensor)]
        return result


def draws_by_sample(whole: Whole, length: int) -> bool:
    """Whether, in training, what is dropped is not told apart by place: on shards, ranks would differ about it."""
    block = copy.deepcopy(whole.block).train()
    with torch.random.fork_rng(devices=[]), torch.no_grad(), _Draws() as draws:
        whole.call.run(block, [x.detach().clone() for x in whole.call.tensors])
    return any(length not in shape[1:] for shape in draws.shapes)
