"""Try the plan of a block again, for a call of the run that does something else than that of the sample."""

import copy
from collections.abc import Collection, Mapping
from contextlib import nullcontext
from enum import Enum
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from hybridpp.cluster import preserved_random_state
from hybridpp.nn import walk
from hybridpp.nn.torch_private import CALL, buffers_of, parameters_of, pytree
from hybridpp.plan_search.block_run import BlockCall, ReferenceBlock, SampleCall, randomized_copy
from hybridpp.plan_search.block_ways import ways_of_call
from hybridpp.plan_search.narrowed_block import narrowed_block
from hybridpp.plan_search.trial_errors import failure_reason, is_machine_failure
from hybridpp.plan_search.verify import Rejected, verify
from hybridpp.sharding_plan.sharding_spec import ShardingSpec

_PLAIN = (bool, int, float, str, type(None), torch.dtype)
_OF_EVERY_MODULE = frozenset(vars(nn.Module())) | {"forward", CALL, "__call__"}


class UnshardedBlock:
    """A block as it was before it was sharded, without the numbers of its weights and buffers.

    Args:
        block: with full parameters.

    Raises:
        Exception: it holds what cannot be copied.
    """

    def __init__(self, block: nn.Module):
        kept = [value for module in walk.modules(block) for value in vars(module).values() if isinstance(value, Tensor)]
        copies: dict[int, Any] = {id(held): held.detach().to("meta") for held in (*walk.buffers(block), *kept)}
        copies |= {
            id(held): nn.Parameter(held.detach().to("meta"), held.requires_grad) for held in walk.parameters(block)
        }
        self._block = copy.deepcopy(block, copies)

    def as_it_is(self, block: nn.Module, sizes: "SizesOfShard") -> nn.Module:
        """The whole block with the flags, counts, buffers and other state that its shard has now.

        Args:
            block: this rank's shard.
            sizes: attributes of it that are those of the shard.

        Raises:
            ValueError: it has other modules.
        """
        made = copy.deepcopy(self._block)
        pairs = [*zip(walk.named_modules(block), walk.named_modules(made), strict=False)]
        if any((name, type(module)) != (other, type(full)) for (name, module), (other, full) in pairs) or (
            len(walk.modules(block)) != len(walk.modules(made))
        ):
            raise ValueError("its modules have been replaced")
        memo: dict[int, Any] = {}
        for (name, module), (_, full) in pairs:
            for key, parameter in parameters_of(module).items():
                if parameter is not None and (complete := parameters_of(full).get(key)) is not None:
                    complete.requires_grad_(parameter.requires_grad)
            for key, buffer in buffers_of(module).items():
                held = buffers_of(full).get(key)
                if buffer is not None and (held is None or held.shape == buffer.shape):
                    buffers_of(full)[key] = _on_host(buffer)
            vars(full).update(_state(name, module, sizes, memo))
        return made


def _state(name: str, module: nn.Module, sizes: "SizesOfShard", memo: dict[int, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in vars(module).items():
        if key in _OF_EVERY_MODULE or sizes.hold(name, key, value):
            continue
        if isinstance(value, _PLAIN):
            found[key] = value
        elif isinstance(value, Tensor):
            found[key] = _on_host(value)
        elif not callable(value) and not _has_modules(value):
            try:
                found[key] = copy.deepcopy(value, memo)
            except Exception as error:  # an object may raise anything
                if is_machine_failure(error):
                    raise
    return found


def _has_modules(value: Any) -> bool:
    return any(isinstance(leaf, nn.Module) for leaf in pytree.tree_leaves(value))


def _on_host(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", copy=True)


class SizesOfShard:
    """Which attributes of a block's modules are those of a shard.

    Args:
        block: before it is sharded.
    """

    def __init__(self, block: nn.Module):
        self._block = block
        self._before = {name: dict(vars(module)) for name, module in walk.named_modules(block)}
        self._sizes: dict[tuple[str, str], Any] = {}

    def sharded(self) -> None:
        """Call it when the block has been sharded."""
        for name, module in walk.named_modules(self._block):
            before = self._before.get(name, {})
            self._sizes |= {
                (name, key): value
                for key, value in vars(module).items()
                if key not in _OF_EVERY_MODULE and key in before and before[key] is not value
            }
        self._before = {}

    def hold(self, name: str, key: str, value: Any) -> bool:
        """Whether a value is that of the shard, as boost has set it."""
        return (name, key) in self._sizes and self._sizes[name, key] is value


class Verdict(Enum):
    """What a trial of a later call says of a block's plan."""

    RIGHT = "right"
    WRONG = "wrong"
    UNKNOWN = "unknown"


class LaterTrial(NamedTuple):
    """The result of :func:`try_later_call`.

    Attributes:
        verdict: of the plan.
        why: a clause about the block; empty: it is right.
    """

    verdict: Verdict
    why: str = ""


class LaterCall(NamedTuple):
    """A call of a block in the run.

    Attributes:
        arguments: of its forward, on the host.
        training: the mode of the block.
        ways: that it took, and no trial before.
    """

    arguments: SampleCall
    training: bool
    ways: Collection[int]


def try_later_call(block: nn.Module, spec: ShardingSpec, call: LaterCall, tp_size: int) -> LaterTrial:
    """Whether a block's plan gives the results and gradients of the whole block in a call of the run.

    As in a search, the block has made-up weights, and ranks are threads of this process. Nothing is communicated.

    Args:
        block: unsharded, as it is in the run; its weights may be on the meta device.
        spec: how it is sharded.
        call: of the run.
        tp_size: number of ranks.

    Raises:
        Exception: memory ran out, or a device failed.
    """
    no_autocast = torch.autocast("cpu", enabled=False) if torch.is_autocast_enabled("cpu") else nullcontext()
    with preserved_random_state(torch.device("cpu")), torch.enable_grad(), no_autocast:
        arguments = call.arguments
        narrow = narrowed_block(block, [arguments], tp_size)
        inner = None if narrow is None else narrow.narrowed(spec)
        if narrow is not None and inner is not None:
            block, spec, arguments = narrow.block, inner, narrow.first_call
        try:
            reference = randomized_copy(block, [arguments])
            taken = _ways(reference, call.training)
            is_finite = all(bool(result.isfinite().all()) for result in reference.outcome.results.values())
        except Exception as error:  # random numbers may make a block raise anything
            return LaterTrial(Verdict.UNKNOWN, f"it cannot run alone ({failure_reason(error)})")
        if not is_finite:
            return LaterTrial(Verdict.UNKNOWN, "its results are not finite")
        found = verify(reference, spec, tp_size)
        if not isinstance(found, Rejected):
            tried = _compared(reference, spec, found)
            if tried.verdict is Verdict.RIGHT and not taken.issuperset(call.ways):
                return LaterTrial(Verdict.UNKNOWN, "it does not do so when it is run again, with other weights")
            return tried
        if found.error is not None:
            return LaterTrial(Verdict.UNKNOWN, f"with shards it raises {found.error}")
        # One that returns something else in each call cannot be compared.
        if isinstance(verify(reference, ShardingSpec(), tp_size), Rejected):
            return LaterTrial(Verdict.UNKNOWN, "it returns something else in each call")
        return LaterTrial(Verdict.WRONG, "gives other results or gradients than whole layers")


def _ways(reference: ReferenceBlock, training: bool) -> frozenset[int]:
    block, call = reference.copy().train(training), _detached(reference.call)
    return ways_of_call(block, *call)


def _detached(call: BlockCall) -> tuple[tuple[Any, ...], Mapping[str, Any]]:
    return call.arguments([x.detach().requires_grad_(x.requires_grad).clone() for x in call.tensors])


def _compared(reference: ReferenceBlock, spec: ShardingSpec, found: ShardingSpec) -> LaterTrial:
    """Of a spec that is right with what was found: whether that is what was applied."""
    gradients = reference.outcome.gradients
    summed = sorted(found.partial_grad - spec.partial_grad)
    complete = sorted(
        name
        for name in spec.partial_grad - found.partial_grad
        if name in gradients and any(bool(part.any()) for part in gradients[name])
    )
    if summed or complete:
        return LaterTrial(Verdict.WRONG, f"gives another gradient of {(summed or complete)[0]!r} than whole layers")
    if dict(found.arguments) != dict(spec.arguments):
        return LaterTrial(Verdict.WRONG, "gives another gradient of an argument than whole layers")
    if dict(found.results) != dict(spec.results):
        return LaterTrial(Verdict.WRONG, "returns a part of a result")
    return LaterTrial(Verdict.RIGHT)
