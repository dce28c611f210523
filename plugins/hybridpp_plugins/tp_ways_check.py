"""Blocks with sharded layers that do something else in the run than in the trial that found their plan right."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from hybridpp.cluster import Group, gather_objects, get_dist_logger
from hybridpp.errors import ConfigError
from hybridpp.nn import walk
from hybridpp.nn.force_eager import has_compiled
from hybridpp.nn.torch_private import FakeTensor, is_functorch_active, pytree, version_or_none
from hybridpp.partition import is_cache
from hybridpp.partition.compiled import is_compiled_by_script
from hybridpp.plan_search import (
    LaterCall,
    LaterTrial,
    SequencePlan,
    SizesOfShard,
    UnshardedBlock,
    Verdict,
    WayRecorder,
    kind_of,
    try_later_call,
)
from hybridpp.sharding_plan import Plan, ShardingSpec

_MOST_NAMED = 4
# Functions that compute each number by itself, or leave numbers as they are, and those that tell of overflows.
_NAMES = """
abs add addcdiv addcmul all alpha_dropout any arange bernoulli bitwise_and bitwise_not bitwise_or bool cat ceil celu
chunk clamp clamp_max clamp_min clip clone copy cos cosh div dropout dropout1d dropout2d dropout3d elu empty
empty_like eq erf exp expand expand_as expm1 feature_alpha_dropout feature_dropout fill flatten flip floor fmod frac
full full_like ge gelu getitem glu gt hardshrink hardsigmoid hardswish hardtanh hypot index_select isfinite isinf
isnan le leaky_relu lerp log log1p logical_and logical_not logical_or logsigmoid lt masked_fill maximum minimum mish
movedim mul nan_to_num narrow native_dropout ne neg new_empty new_full new_zeros normal ones ones_like permute pow
prelu radd rand rand_like randn randn_like random reciprocal relu relu6 remainder repeat repeat_interleave reshape
rmul roll round rrelu rsqrt rsub rtruediv select selu sgn sigmoid sign signbit silu sin sinh softplus softshrink
softsign split sqrt square squeeze stack sub swapaxes swapdims tan tanh tanhshrink threshold transpose truediv trunc
unbind unflatten uniform unsqueeze view where zero zeros zeros_like
"""
_BY_ITSELF = frozenset(_NAMES.split())
_IN_A_CALL = "after a call of the model, which tells what its sharded blocks did"


class ShardedBlock(NamedTuple):
    """A block with sharded layers.

    Attributes:
        module: with this rank's shards.
        spec: how it is sharded; names are inside the block.
        unsharded: the block before; None: it cannot be copied.
        sizes: attributes that are those of a shard.
        kind: a number, equal for blocks of which one trial is enough.
        ways: that it took in the trial; None: there was none.
    """

    module: nn.Module
    spec: ShardingSpec
    unsharded: UnshardedBlock | None
    sizes: SizesOfShard
    kind: int
    ways: frozenset[int] | None


def sharded_blocks(model: nn.Module, blocks: list[str], plan: Plan, sequences: SequencePlan) -> dict[str, ShardedBlock]:
    """The blocks that will have sharded layers and complete sequences, by name; call it before they are sharded.

    Args:
        model: with full parameters.
        blocks: names of its blocks that are not compiled.
        plan: how it will be sharded.
        sequences: the blocks that will run on sequence shards.
    """
    kinds: list[tuple[Any, ShardingSpec, UnshardedBlock | None]] = []
    found = {}
    for name in blocks:
        spec, block = plan.spec.of_block(name), walk.submodule(model, name)
        if spec == ShardingSpec() or name in sequences.blocks:
            continue
        settings = kind_of(block, (), {})
        kind = next((n for n, (one, other, _) in enumerate(kinds) if one == settings and other == spec), len(kinds))
        if kind == len(kinds):
            kinds.append((settings, spec, _copied(block)))
        found[name] = ShardedBlock(block, spec, kinds[kind][-1], SizesOfShard(block), kind, plan.ways.get(name))
    return found


def _copied(block: nn.Module) -> UnshardedBlock | None:
    try:
        return UnshardedBlock(block)
    except Exception:  # a block may hold what cannot be copied
        return None


class _Found(NamedTuple):
    """A call that took other ways than any that was tried.

    Attributes:
        names: of blocks of one kind that did.
        call: of the first of them; None: its arguments are no longer those of the call, or a part.
        words: the functions, with their lines.
    """

    names: list[str]
    call: LaterCall | None
    words: list[str]


class TensorParallelWaysCheck:
    """Looks, in the steps 1, 2, 4, 8 and so on, whether sharded blocks do what they did when their plan was tried.

    A plan is right for what a block did on the sample. A branch that it takes later (an argument that was not given
    there, a flag that the script sets after a warm-up) may take features together of which a rank has a part. So the
    plan is tried again then, for that call. Steps of training and of evaluation, and the script's own calls, count
    each by themselves; the other steps are not touched.

    Args:
        blocks: with sharded layers, by name.
        tp: the ranks that share them. The first one looks, for all.

    Attributes:
        is_active: whether the step that runs is watched; the same on all ranks.
    """

    def __init__(self, blocks: Mapping[str, ShardedBlock], tp: Group):
        self._blocks, self._tp = blocks, tp
        for block in blocks.values():
            block.sizes.sharded()
        # A trace runs one of several equal blocks.
        of_kind = {block.kind: block.ways for block in blocks.values() if block.ways is not None}
        ways = {name: block.ways or of_kind.get(block.kind) for name, block in blocks.items()}
        self._known = {name: None if taken is None else set(taken) for name, taken in ways.items()}
        self._found: dict[Any, _Found] = {}
        self._warned: set[str] = set()
        self._counts: dict[Any, int] = {}
        self.is_active = False

    def begin(self, kind: Any, number: int | None = None) -> None:
        """Call before the passes of a step, or before a call.

        Args:
            kind: of the step: those of each kind are counted.
            number: of the step, from 1; None: it is the next one of its kind.
        """
        if number is None:
            number = self._counts[kind] = self._counts.get(kind, 0) + 1
        # A compiler that the script has called would trace what watches.
        self.is_active = not number & (number - 1) and not has_compiled()

    @contextmanager
    def watching(self) -> Iterator[None]:
        """A context for the passes of a step that :meth:`begin` has begun."""
        if not self.is_active or self._tp.rank:
            yield
            return
        with ExitStack() as stack:
            for name, block in self._blocks.items():
                if not any(map(is_compiled_by_script, walk.modules(block.module))):
                    watch = _BlockWatch(name, block.module, self._note)
                    stack.callback(watch.remove)
            yield

    def _note(self, name: str, ways: Mapping[int, str], call: Callable[[], LaterCall | None]) -> None:
        """Note that a block has been called."""
        block, known = self._blocks[name], self._known[name]
        if known is None:  # its plan was not tried: this is what others are compared with
            self._known[name] = set(ways)
            return
        new = frozenset(ways) - known
        if not new:
            return
        found = self._found.get((block.kind, new))
        if found is not None:
            found.names.extend({name}.difference(found.names))
        else:
            made = call()
            # First those that may take features together.
            words = sorted(dict.fromkeys(text for way, text in ways.items() if way in new), key=_is_by_itself)
            self._found[block.kind, new] = _Found([name], None if made is None else made._replace(ways=new), words)

    def refusal(self) -> str:
        """Why the step is refused, empty: it is not. Warns of what cannot be tried. Nothing is communicated."""
        self.is_active = False
        refused, found = "", dict(self._found)
        self._found.clear()
        for (_, new), one in found.items():
            verdict, why = self._tried(one)
            if verdict is Verdict.WRONG:
                refused = refused or self._refusal(one, why)
                continue
            for name in one.names:
                known = self._known[name]
                assert known is not None, "only then there is something new"
                known |= new
            if verdict is Verdict.UNKNOWN and not all(map(_is_by_itself, one.words)):
                self._warn(one, why)
        return refused

    def _tried(self, found: _Found) -> LaterTrial:
        block = self._blocks[found.names[0]]
        if block.unsharded is None:
            return LaterTrial(Verdict.UNKNOWN, "it cannot be copied")
        if found.call is None:
            return LaterTrial(Verdict.UNKNOWN, "its arguments are not complete, or it writes to them")
        try:
            unsharded = block.unsharded.as_it_is(block.module, block.sizes)
            return try_later_call(unsharded, block.spec, found.call, self._tp.size)
        except Exception as error:  # other ranks are not here: no rank may end alone
            return LaterTrial(Verdict.UNKNOWN, f"{type(error).__name__}: {error}")

    def _refusal(self, found: _Found, why: str) -> str:
        layers = [*found.words[:_MOST_NAMED], *(["…"] if found.words[_MOST_NAMED:] else [])]
        block = found.names[0]
        return (
            f"block {block!r} calls {', '.join(layers)}, which it did not on the sample, and so, sharded over "
            f"tp_size={self._tp.size}, it {why}: a rank has a part of the features that are taken together there. "
            "Weights have not been changed by this step; steps before may have done the same. Give booster.boost a "
            "sample that does this, samples=[one, another] with one batch of each kind, or set such flags before "
            "boost: then the search leaves what must be whole. Or keep these layers whole: "
            f"tensor_parallel_plan={{'{block}.*': 'replicated', ...}}. See docs/tensor_parallelism.md."
        )

    def _warn(self, found: _Found, why: str) -> None:
        names = [name for name in found.names if name not in self._warned]
        self._warned.update(found.names)
        if names:
            layers = [*found.words[:_MOST_NAMED], *(["…"] if found.words[_MOST_NAMED:] else [])]
            get_dist_logger().warning(
                f"block {names[0]!r}{f' and {len(names) - 1} more' if names[1:] else ''}, whose layers are sharded "
                f"over tp_size={self._tp.size}, calls {', '.join(layers)}, which it did not on the sample. Whether its "
                f"plan is right for that could not be tried: {why}. It is if no function takes features together of "
                "which a rank has a part. Give booster.boost a sample that does this, samples=[one, another], or keep "
                "these layers whole in tensor_parallel_plan."
            )

    def around(self, inner: Callable[..., Any] | None, num_steps: Callable[[], int]) -> Callable[..., Any]:
        """A wrapper of the script's own calls of the model, which copies share.

        Collective in calls that are watched: an exchange of the ranks that share layers.

        Args:
            inner: wraps them inside.
            num_steps: of the optimizer so far; all calls with gradients of a step are watched.
        """

        def run(forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            if is_functorch_active():
                return inner(forward, args, kwargs) if inner else forward(*args, **kwargs)
            self.begin("call", num_steps() + 1 if torch.is_grad_enabled() else None)
            is_watched = self.is_active
            with self.watching():
                result = inner(forward, args, kwargs) if inner else forward(*args, **kwargs)
            if is_watched:
                words = next(filter(None, gather_objects(self._tp, _IN_A_CALL, self.refusal())), "")
                if words:
                    raise ConfigError(words)
            return result

        return run


class _BlockWatch:
    """Watches the calls of one block."""

    def __init__(
        self,
        name: str,
        module: nn.Module,
        note: Callable[[str, Mapping[int, str], Callable[[], LaterCall | None]], None],
    ):
        self._name, self._note = name, note
        self._arguments: Any = None
        self._versions: list[int | None] | None = None
        self._recorder = WayRecorder(module)
        self._hooks = [
            module.register_forward_pre_hook(lambda _, *call: self._begin(call), prepend=True, with_kwargs=True),
            module.register_forward_hook(lambda module, *_: self._end(module), always_call=True),
        ]

    def remove(self) -> None:
        """Take the hooks off."""
        self._recorder.remove()
        for hook in self._hooks:
            hook.remove()

    def _begin(self, call: Any) -> None:
        # Traces call blocks, too.
        is_fake = any(isinstance(leaf, FakeTensor) for leaf in pytree.tree_leaves(call))
        if not is_fake and not is_functorch_active():
            self._arguments, self._versions = call, _versions(call)

    def _end(self, module: nn.Module) -> None:
        call, self._arguments = self._arguments, None
        if call is None or is_functorch_active():
            return

        def made() -> LaterCall | None:
            if self._versions is None or _versions(call) != self._versions:
                return None
            # As in the search: caches are filled with the heads of a rank.
            call_without = pytree.tree_map(lambda leaf: None if is_cache(leaf) else leaf, call)
            return LaterCall(pytree.tree_map_only(Tensor, _on_host, call_without), module.training, ())

        self._note(self._name, self._recorder.found, made)


def _is_by_itself(words: str) -> bool:
    return words.partition(" ")[0].rstrip("_") in _BY_ITSELF


def _versions(call: Any) -> list[int | None] | None:
    """Of the tensors of a call; None: one is of another kind, which may have to be gathered."""
    tensors = [leaf for leaf in pytree.tree_leaves(call) if isinstance(leaf, Tensor)]
    if any(type(tensor) not in (Tensor, nn.Parameter) for tensor in tensors):
        return None
    return [version_or_none(tensor) for tensor in tensors]


def _on_host(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", copy=True).requires_grad_(tensor.requires_grad)
