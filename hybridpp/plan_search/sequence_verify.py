"""Run a sharded block on sequence shards, on in-process ranks, and compare it with the reference block."""

from typing import Any

import torch
from torch import Tensor

from hybridpp.cluster import Group, Loopback, current_world
from hybridpp.module_adapter import ModuleAdapter
from hybridpp.nn.checkpointing import in_checkpoint
from hybridpp.nn.torch_private import TorchDispatchMode, pytree
from hybridpp.plan_search.block_run import BlockOutcome, ReferenceBlock, ResultsDiffer, copy_block
from hybridpp.plan_search.gradient_sketch import close
from hybridpp.plan_search.trial_errors import failure_reason
from hybridpp.plan_search.verify import Rejected, in_other_ways, partial_gradients, refused_in_run, summed_in_both
from hybridpp.sharding_plan.sharding_spec import ShardingSpec
from hybridpp.tensor_parallel.parameter_sharding import ParameterSharding, sharding_of
from hybridpp.tensor_parallel.sequence_block import CHECKPOINTING, SequenceBlock, run_sequence_parallel
from hybridpp.tensor_parallel.shard import shard


def verify_sequence(
    reference: ReferenceBlock, spec: ShardingSpec, sequence: SequenceBlock, tp_size: int
) -> frozenset[str] | Rejected:
    """The replicated parameters whose gradients are sums over ranks, if a block runs on sequence shards.

    In training, too, where the block does something else there than in evaluation; with the arguments of other samples;
    with numbers of many sizes; and in the formats of the run.

    Args:
        reference: the block with its outcome.
        spec: how it is sharded.
        sequence: how it runs on sequence shards.
        tp_size: number of ranks.
    """
    found = _verify(reference, spec, sequence, tp_size)

    def otherwise(other: ReferenceBlock, summed: frozenset[str]) -> frozenset[str] | Rejected:
        again = _verify(other, spec, sequence, tp_size)
        if isinstance(again, Rejected):
            return again
        both = summed_in_both(reference, other, summed, again)
        return Rejected() if both is None else both

    if not isinstance(found, Rejected):
        found = in_other_ways(reference, found, otherwise)
    if isinstance(found, Rejected):
        return found

    def divide(adapter: ModuleAdapter, group: Group) -> None:
        run_sequence_parallel("", sequence, shard(adapter, spec, group))

    return refused_in_run(reference, divide, tp_size) or found


def _verify(
    reference: ReferenceBlock, spec: ShardingSpec, sequence: SequenceBlock, tp_size: int
) -> frozenset[str] | Rejected:
    def run() -> tuple[BlockOutcome, dict[str, ParameterSharding | None]]:
        group = current_world().split([range(tp_size)])
        assert group is not None
        block = reference.copy()
        run_sequence_parallel("", sequence, shard(ModuleAdapter(block), spec, group, share_memory=True))
        return reference.outcome_of(block), {name: sharding_of(held) for name, held in block.named_parameters()}

    try:
        return _summed(reference, Loopback(tp_size).run(run))
    except ResultsDiffer:
        return Rejected()
    except Exception as error:  # a wrong candidate may make the block raise anything
        return Rejected(failure_reason(error))


def _summed(
    reference: ReferenceBlock, ranks: list[tuple[BlockOutcome, dict[str, ParameterSharding | None]]]
) -> frozenset[str] | Rejected:
    expected = reference.outcome
    same = all(close(rank.results[key], x) for rank, _ in ranks for key, x in expected.results.items())
    same = same and all(
        key in rank.left and close(rank.left[key], x) for rank, _ in ranks for key, x in expected.left.items()
    )
    if not same or not all(rank.gradients for rank, _ in ranks):
        return Rejected()
    params = {name: sharding.shard for name, sharding in ranks[0][1].items() if sharding is not None}
    summed = partial_gradients(expected, [rank for rank, _ in ranks], params)
    return Rejected() if summed is None else summed


class _Draws(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch
    """Records the shapes of random numbers."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch
        self.shapes: list[tuple[int, ...]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if torch.Tag.nondeterministic_seeded in func.tags:
            self.shapes += [tuple(x.shape) for x in pytree.tree_leaves(result) if isinstance(x, Tensor)]
        return result


def training_obstacle(reference: ReferenceBlock, length: int) -> str | None:
    """Why a block that was verified in evaluation would be wrong in training; None: no reason is known.

    Args:
        reference: the block with its arguments.
        length: of its sequences.
    """
    block = copy_block(reference.block).train()
    checkpointed: list[bool] = []
    for module in block.modules():
        if CHECKPOINTING in vars(module):
            setattr(module, CHECKPOINTING, lambda function, *args, **_: function(*args))
        if any(held.dim() > 1 for held in module.parameters(recurse=False)):
            module.register_forward_pre_hook(lambda *_: checkpointed.append(in_checkpoint()))
    tensors = [x.detach().requires_grad_(x.requires_grad).clone() for x in reference.call.tensors]
    with torch.random.fork_rng(devices=[]), _Draws() as draws:
        reference.call.run(block, tensors)
    if any(length not in shape[1:] for shape in draws.shapes):
        # On sequence shards, ranks would draw different numbers.
        return "it draws random numbers per sample, not per position"
    if any(checkpointed):
        return "it checkpoints activations of its layers itself (use gradient_checkpoint_config instead)"
    return None
