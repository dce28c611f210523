"""Run a divided block on shards of sequences, on in-process ranks, and compare it with the whole one by number."""

import inspect
import sys
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from hybridpp.cluster import Loopback, current_world
from hybridpp.tensor_parallel.division import Part
from hybridpp.tensor_parallel.inference.compare import summed_gradients
from hybridpp.tensor_parallel.inference.numbers import close
from hybridpp.tensor_parallel.inference.run import Outcome, Whole, copy_of
from hybridpp.tensor_parallel.placement import Placement, placement_of
from hybridpp.tensor_parallel.plan import Plan
from hybridpp.tensor_parallel.sequence import CHECKPOINTING, SequenceBlock, run_on_shards
from hybridpp.tensor_parallel.shard import shard

_CHECKPOINT = inspect.unwrap(checkpoint).__code__


def summed_on_shards(whole: Whole, plan: Plan, sequence: SequenceBlock, tp_size: int) -> frozenset[str] | None:
    """The whole parameters whose gradients are sums of the ranks', if a block runs on shards; None: it cannot.

    Args:
        whole: the block, with what it gives.
        plan: how it is divided; names are inside of it.
        sequence: how it would run.
        tp_size: over how many ranks.
    """

    def run() -> tuple[Outcome, dict[str, Placement | None]]:
        group = current_world().split([range(tp_size)])
        assert group is not None
        block = copy_of(whole.block)
        run_on_shards(block, "", sequence, shard(block, plan, group))
        outcome = Outcome(block, whole.call, whole.outcome)
        return outcome, {name: placement_of(held) for name, held in block.named_parameters()}

    try:
        ranks = Loopback(tp_size).run(run)
    except Exception:
        return None  # whatever a wrong guess makes of a block
    expected = whole.outcome
    same = all(close(one.results[n], x) for one, _ in ranks for n, x in expected.results.items())
    same = same and all(
        key in one.left and close(one.left[key], x) for one, _ in ranks for key, x in expected.left.items()
    )
    if not same or not all(one.gradients for one, _ in ranks):
        return None
    parts = {name: Part(lie.dim, lie.parts, lie.copies) for name, lie in ranks[0][1].items() if lie is not None}
    return summed_gradients(expected, [one for one, _ in ranks], parts)


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


def obstacle_in_training(whole: Whole, length: int) -> str | None:
    """Why a block that gives the right numbers in evaluation would not in training; None: no reason is seen.

    Args:
        whole: the block.
        length: of its sequences.
    """
    block = copy_of(whole.block).train()
    checkpointed: list[bool] = []
    for module in block.modules():
        if CHECKPOINTING in vars(module):
            setattr(module, CHECKPOINTING, lambda function, *args, **_: function(*args))
        if any(held.dim() > 1 for held in module.parameters(recurse=False)):
            module.register_forward_pre_hook(lambda *_: checkpointed.append(_in_checkpoint()))
    tensors = [x.detach().requires_grad_(x.requires_grad).clone() for x in whole.call.tensors]
    with torch.random.fork_rng(devices=[]), _Draws() as draws:
        whole.call.run(block, tensors)
    if any(length not in shape[1:] for shape in draws.shapes):
        # On shards, ranks would differ about it.
        return "it draws random numbers for samples, not for places in them"
    if any(checkpointed):
        return "it checkpoints activations of its layers by itself (give gradient_checkpoint_config instead)"
    return None


def _in_checkpoint() -> bool:
    frame: FrameType | None = sys._getframe()
    while frame is not None and frame.f_code is not _CHECKPOINT:
        frame = frame.f_back
    return frame is not None
