"""Gradients in flat buckets, reduced over the replicas during the last backward pass."""

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import AbstractContextManager, contextmanager
from enum import Enum, auto

import torch
from torch import Tensor, nn

from hybridpp.cluster import Group
from hybridpp.data_parallel.accumulator import GradientHooks, HiddenGradient, HiddenGradients
from hybridpp.data_parallel.bucket import Bucket, GradientSharding
from hybridpp.data_parallel.bucket_reduction import BucketReduction
from hybridpp.data_parallel.gradient_checks import GradientChecks
from hybridpp.data_parallel.hook_checks import HookChecks
from hybridpp.data_parallel.layout import ShardLayout
from hybridpp.data_parallel.outside_gradients import OutsideGradients
from hybridpp.data_parallel.pass_reduction import PassReduction
from hybridpp.data_parallel.reducible_sums import ReducibleSums
from hybridpp.data_parallel.replicas import HybridReplicas, Replicas
from hybridpp.data_parallel.scattered_sums import ScatteredSums
from hybridpp.data_parallel.shared_gradients import ReachedFlags, SharedGradients, Summand
from hybridpp.errors import ConfigError
from hybridpp.nn.torch_private import is_in_running_backward

_UNKNOWN_BACKWARD = (
    "a backward pass outside of hybridpp reached a boosted model's parameters: its gradients would not be scaled or "
    "reduced. Call booster.backward(loss, optimizer) or booster.execute_pipeline. A loss that goes through several "
    "models needs booster.backward, with one booster for all of them and pp_size=1; freeze (requires_grad_(False)) "
    "those that it does not train, or make them one module."
)


class _State(Enum):
    CONSUMED = auto()
    LOCAL = auto()
    REDUCED = auto()


class GradientBuckets:
    """Accumulates the gradients of a rank's parameters over micro-batches and calls, and reduces them.

    Accumulation is in fp32 (float64 for float64 parameters). Between backward and step, ``parameter.grad`` is a view
    into the buckets if ``exposes_grad`` and the dtypes agree; otherwise it is a :class:`HiddenGradient`.

    In every precision, backward passes add up until ``consume`` (an optimizer step); the next one starts from zero.
    Gradients are summed over the replicas; the weights of the losses make the sum a mean.

    Args:
        parameters: this rank's trainable parameters, by name, in the order of the forward.
        group: the replicas.
        layout: the buckets, with a segment for each replica that divides them; shared parameters have their own.
        shared: by parameter, the groups whose members hold a summand of its gradient each (stages that share the
            parameter, ranks that apply it to different shards of an activation).
        communication_dtype: dtype of the messages between replicas; None: the accumulation dtype.
        exposes_grad: whether ``parameter.grad`` shows the gradients.
        coalesced_group: one of the groups in ``shared`` whose members hold the same parameters: all its sums go in one
            message.
        fuses_products: whether :meth:`OutsideGradients.add_product` may be used.
        sharding: what a replica keeps of each sum (ZeRO). If it is a segment, ``parameter.grad`` is a
            :class:`HiddenGradient` between reduction and step.

    Attributes:
        parameters: as given.
        exposes_grad: as given.
        communication_dtype: as given.
        are_in_step: whether all replicas run the same passes in the next step, so that they begin reductions alike.
        cleared: parameters whose reduced gradients the script has set to None.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        group: Replicas,
        layout: ShardLayout,
        shared: Mapping[str, Sequence[Group]] | None = None,
        communication_dtype: torch.dtype | None = None,
        exposes_grad: bool = True,
        coalesced_group: Group | None = None,
        fuses_products: bool = True,
        sharding: GradientSharding = GradientSharding.NONE,
    ):
        if group.size == 1:
            sharding = GradientSharding.NONE
        self.parameters = parameters
        self._group = group
        self._layout = layout
        self._scatters = sharding is not GradientSharding.NONE
        self._reduces_each_pass = sharding is GradientSharding.MICROBATCH
        self._accumulator = ReducibleSums(parameters, layout, exposes_grad, sharding)
        self._shared = SharedGradients(coalesced_group)
        for name, groups in (shared or {}).items():
            for one in groups:
                self.add_shared(name, one, self._accumulator.views[name])
        self.communication_dtype = communication_dtype
        self.exposes_grad = exposes_grad and not self._scatters
        # What is not exposed; in fp32 with ZeRO after a reduction only.
        self._hidden = HiddenGradients({} if self.exposes_grad else parameters, self._scatters)
        self._is_always_hidden = not exposes_grad
        self._fuses_products = fuses_products
        self._hooks = GradientHooks(self._accumulator, parameters, self._on_gradient)
        self._used = self._hooks.reached
        # What other ranks have reached, too, when gradients were reduced last; None: not since the sums began.
        self._used_anywhere: ReachedFlags | None = None
        self.cleared: set[str] = set()
        # Gradients that the script has set to zeros, not None.
        self._zeros: set[str] = set()
        self._scattered = ScatteredSums(self._accumulator.buckets, layout.index, group)
        self._reduction = self._make_reduction()
        self._names_of_unit: defaultdict[int, list[str]] = defaultdict(list)
        for bucket in self._accumulator.buckets:
            for unit in bucket.layout.units:
                self._names_of_unit[unit] += bucket.views
        self.are_in_step = False
        self._state = _State.CONSUMED
        # Whether backward passes of the library run: others are refused.
        self._is_open = False
        # Of the gradients, when a step was done with them, or they were dropped.
        self._version: tuple[int, ...] = ()
        self._sync = True
        self._is_stashed = False

    def _make_reduction(self) -> BucketReduction | None:
        if self._group.size == 1:
            return None
        arguments = (self._accumulator, self._group, self.communication_dtype, self._used, self._on_launch)
        by_unit = any(bucket.layout.units for bucket in self._accumulator.buckets)
        if self._reduces_each_pass:
            return PassReduction(*arguments, scatter=True, by_unit=by_unit)
        return BucketReduction(*arguments, scatter=self._scatters, by_unit=by_unit)

    def _on_launch(self, bucket: Bucket) -> None:
        """A reduction has begun. If it has the bucket, the next gradients come through hooks, which wait for it."""
        if bucket.each_pass:
            self._accumulator.lend(bucket)
            self._hooks.enable(bucket.views)
        # Else the host would wait for reductions that other replicas begin in a later pass.
        if isinstance(self._group, HybridReplicas) and (bucket.each_pass or self.are_in_step):
            self._group.go_on(num_left=1)

    @property
    def views(self) -> dict[str, Tensor]:
        """Where each parameter's complete sum lies, by name; it may hold old values."""
        return self._accumulator.views

    @property
    def held_tensors(self) -> list[Tensor]:
        """All memory that gradients have now."""
        return [tensor for bucket in self._accumulator.buckets for tensor in bucket.held_tensors()]

    @property
    def gradients(self) -> dict[str, Tensor]:
        """This replica's part of the sums, by name: after a reduction that scatters its pieces, else all."""
        if self._is_scattered:
            return self._scattered.pieces
        with self._writing():
            return self._accumulator.zero_stale(self._accumulator.buckets if self._is_stashed else None)

    def whole_gradients(self) -> dict[str, Tensor]:
        """The sums, by name. Collective: all replicas of this stage, after a reduction that scatters."""
        if not self._is_scattered:
            with self._writing():
                return self._accumulator.zero_stale()
        if self._state is _State.LOCAL:
            raise ConfigError(
                'gradients are not complete inside no_sync, and with zero_reduce="microbatch" no replica has its own '
                "ones. Read them after the block."
            )
        return self._scattered.gather()

    @property
    def _is_scattered(self) -> bool:
        return self._scatters and not self._is_stashed and (self._state is not _State.LOCAL or self._reduces_each_pass)

    def add_shared(self, name: str, group: Group, view: Tensor) -> None:
        """Add a group whose members hold a summand each of a gradient, or of the part of it that ``view`` is."""
        self._shared.summands.append(Summand(name, group, view))

    def no_sync(self) -> AbstractContextManager[None]:
        """A context in which gradients are only accumulated; what comes after it reduces them."""
        return self._syncing(False)

    def resumed(self, reduces: bool) -> AbstractContextManager[None]:
        """A context for the rest of a step that an error ended, and that ``reduces`` gradients or only adds up."""
        self._state, self._is_open = _State.LOCAL, True
        return self._syncing(reduces)

    @contextmanager
    def _syncing(self, reduces: bool) -> Iterator[None]:
        previous, self._sync = self._sync, reduces
        try:
            yield
        finally:
            self._sync = previous

    def release(self, name: str) -> None:
        """Let a parameter go: neither a hook nor a gradient is left on it."""
        self._hooks.release(name)
        self.parameters[name].grad = None

    def hide_on(self, updated: Mapping[str, Tensor]) -> None:
        """Let what is updated for parameters, by name, show hidden gradients as these do."""
        if not self.exposes_grad:
            self._hidden.add(updated)

    def begin(self) -> None:
        """Get ready for backward passes.

        Raises:
            ConfigError: see :meth:`HiddenGradients.cleared`.
        """
        if not self._scatters:  # else other memory is refused
            self._hooks.keep()
        if self._hidden.are_used:
            cleared = self._hidden.cleared()
            self._zeros = (self._zeros - cleared) | self._hidden.zeros()
            self._used -= cleared
        else:
            self._drop(self._hidden.cleared())
        if self._state is _State.CONSUMED:
            self._zeros |= self._written_zeros()
        dropped = self._accumulator.dropped()
        self._zeros -= dropped
        self._hidden.hide()
        if self._reduction is not None:
            self._reduction.settle()
            self._reduction.reset()
        if self._state is _State.CONSUMED:
            if self.exposes_grad:
                self._accumulator.ask_for_zeros(self._used - dropped - self._zeros)
            self.zero()
        else:
            self._used -= dropped
        self._used |= {name for name in self._zeros if self.parameters[name].requires_grad}
        self._hooks.enable()
        self.cleared.clear()
        if self._state is _State.REDUCED:
            self._set_aside()
        self._accumulator.apart = self._hooks.find_others()
        self._accumulator.begin()
        self._state, self._is_open = _State.LOCAL, True
        self._hooks.collect_settled()

    def _drop(self, names: set[str]) -> None:
        """Set sums that the script has dropped to zero.

        Raises:
            ConfigError: they consist of what is reduced and what is not.
        """
        if not names:
            return
        if self._state is _State.LOCAL and any(
            bucket.each_pass or bucket.aside is not None
            for bucket in map(self._accumulator.bucket_of.get, names)
            if bucket
        ):
            raise ConfigError(
                f"{min(names)}.grad was set to None inside no_sync, where a part of the gradient is reduced already "
                "and a part is not. Set it to None after the block, or call optimizer.zero_grad()."
            )
        views = self._scattered.pieces if self._is_scattered else self._accumulator.zero_stale()
        for name in names & views.keys():
            views[name].zero_()
        self._used -= names
        self._zeros -= names

    def end_backward(self) -> None:
        """After a backward pass, before the next: add the gradients that it left in small parameters."""
        self._hooks.end_backward()

    def _set_aside(self) -> None:
        """Keep reduced sums apart, so that the next reduction counts them once."""
        held = [bucket for bucket in self._accumulator.buckets if not bucket.frees]
        if self._group.size > 1:
            for bucket in held:
                self._accumulator.set_aside(bucket)
        else:
            self._accumulator.zero_stale(held)
            self._shared.keep_one_copy()

    def begin_last_backward(self, stage: int | None = None, pending: Collection[str] | None = None) -> bool:
        """Prepare for the backward pass that completes a stage's gradients: each complete bucket is reduced in it.

        Args:
            stage: of the pass; None: all stages of this rank.
            pending: the parameters that the pass may add to; None: all of the stage.

        Returns:
            Whether gradients are reduced over replicas.
        """
        if self._reduction is None or self._is_stashed or not (self._sync or self._reduces_each_pass):
            return False
        self._hooks.enable(self._reduction.names_of(stage))
        self._reduction.begin(stage, pending)
        return True

    @property
    def has_hooks(self) -> bool:
        """Whether the script has hooks on the gradients of parameters."""
        return self._hooks.has_others

    def checks(self, model: nn.Module, divided: Mapping[str, int]) -> GradientChecks:
        """What finds code of the script or the user's model that makes of gradients what depends on the layout.

        Args:
            model: the user's.
            divided: the dimensions along which ranks share parameters, by name.
        """
        return GradientChecks(model, HookChecks(self.parameters, self._hooks.keys, divided))

    def outside(self) -> OutsideGradients:
        """Where gradients are added that are computed outside of autograd."""
        return OutsideGradients(
            self._accumulator, self._hooks, self._reduction, self._refuse_unknown, fuses_products=self._fuses_products
        )

    def _refuse_unknown(self) -> None:
        if not self._is_open:
            raise ConfigError(_UNKNOWN_BACKWARD)

    def _on_gradient(self, name: str) -> bool:
        """A gradient has arrived; whether this is the last pass that adds to it."""
        self._refuse_unknown()
        self._used.add(name)
        return self._reduction is not None and self._reduction.arrived(name)

    def finish_grad_sync(self) -> None:
        """Finish the sums over the groups of shared parameters and over the replicas.

        Collective: all replicas of this stage, and all ranks that share a parameter; not inside ``no_sync``.
        """
        self._is_open = False
        if self._hidden.is_shown and self._state is not _State.LOCAL:
            return
        self._hidden.hide()
        self.end_backward()
        self._hooks.enable()
        self._accumulator.join()
        if self._state is not _State.LOCAL:
            return
        self._accumulator.zero_stale()
        if zeros := self._accumulator.take_zeros():
            self._zeros |= zeros
            self._used |= zeros
        if not self._sync:
            if self._reduction is not None and not self._is_stashed:
                self._reduction.end_passes()
            # What each pass reduces is no longer in what a parameter would show.
            if (self._is_always_hidden or self._reduces_each_pass) and not self._is_stashed:
                self._accumulator.hide()
                self._hidden.show(self._used)
            return
        if self._reduction is not None:
            self._used_anywhere = self._reduction.finish(self._sum_shared)
        elif self._shared.summands:
            self._used_anywhere = self._sum_shared()
        self._state = _State.REDUCED
        self._drop_unreached()
        if self._scatters:
            self._accumulator.hide()
        if not self.exposes_grad:
            self._hidden.show(self._used | self._summed)

    def _drop_unreached(self) -> None:
        """Let exposed gradients that no pass has reached be None, as in torch; where only the device knows, zeros."""
        anywhere = self._used_anywhere
        is_known = anywhere is None or anywhere.flags.is_cpu
        if self.exposes_grad and is_known and not self._is_stashed and len(self._used) < len(self.parameters):
            self._accumulator.drop(self.unused_parameters())

    def _sum_shared(self) -> ReachedFlags:
        return self._shared.sum(self._used)

    @property
    def _summed(self) -> set[str]:
        """Parameters to whose gradients other ranks of this replica may have added; to what is frozen, none has."""
        if self._state is not _State.REDUCED:
            return set()
        return {one.name for one in self._shared.summands if self.parameters[one.name].requires_grad}

    @property
    def is_consumed(self) -> bool:
        """Whether there has been no backward pass since the last ``consume``."""
        return self._state is _State.CONSUMED

    @property
    def has_gradients(self) -> bool:
        """Whether a backward pass has reached a parameter here since the last ``consume`` or ``zero``."""
        return bool(self._used or self._summed) and not self.is_consumed

    @property
    def version(self) -> tuple[int, ...]:
        """Changes with every change of the gradients, also through ``parameter.grad``, but not through ``.data``."""
        return self._accumulator.version

    def sample(self) -> list[Tensor]:
        """Copies of some elements of the gradients, at fixed positions in a few buckets."""
        return self._accumulator.sample()

    def samples_of(self, names: Collection[str]) -> dict[str, Tensor]:
        """Copies of some elements of the gradients of these parameters; of complex ones none."""
        return self._accumulator.samples_of(names)

    @property
    def is_syncing(self) -> bool:
        """Whether gradients are reduced: not inside ``no_sync``."""
        return self._sync

    def launch_remaining(self, stage: int | None = None) -> None:
        """Start the remaining reductions of a stage, or of all (None), after its last backward pass.

        Collective: all replicas of this stage.
        """
        if self._reduction is not None:
            self._reduction.launch_remaining(stage)

    def reduce_at_end(self, names: Iterable[str]) -> None:
        """Do not reduce these parameters' gradients in :meth:`launch_unit`."""
        if self._reduction is not None:
            self._reduction.reduce_at_end(names)

    def launch_unit(self, unit: int) -> None:
        """Start to reduce what a unit has for itself, when a backward pass is done with it. Collective: replicas."""
        if self._reduction is not None and not self._is_stashed:
            self._reduction.launch_unit(unit)

    @property
    def trained_units(self) -> AbstractSet[int]:
        """The units that have parameters which are trained."""
        return self._names_of_unit.keys()

    def will_arrive(self, unit: int) -> bool:
        """Whether the backward pass that runs on this thread adds to gradients of a unit, before or after this."""
        return any(is_in_running_backward(self.parameters[name]) for name in self._names_of_unit[unit])

    def are_awaited(self, unit: int, *, from_any_pass: bool) -> bool:
        """Whether gradients of a unit are to come from the pass that runs; ``from_any_pass``: or from another."""
        if self._reduction is None:
            return False
        pending = self._reduction.pending(unit)
        return any(from_any_pass or is_in_running_backward(self.parameters[name]) for name in pending)

    def unread_flags(self) -> Tensor | None:
        """What :meth:`unused_parameters` will read of the device, for the caller to read with other numbers."""
        if self._state is not _State.REDUCED or len(self._used) == len(self.parameters):
            return None
        return None if self._used_anywhere is None else self._used_anywhere.flags

    def take_flags(self, flags: Sequence[float]) -> None:
        """Take over the numbers of :meth:`unread_flags`."""
        if self._used_anywhere is not None:
            self._used_anywhere.take(flags)

    def unused_parameters(self) -> list[str]:
        """Parameters whose gradients no backward pass has reached on any rank, or the script has set to None."""
        unused = [name for name in self.parameters if name not in self._used]
        if self._used_anywhere is not None and not self.cleared.issuperset(unused):
            reached = self._used_anywhere.read() - self.cleared
            unused = [name for name in unused if name not in reached]
        return unused

    def sync_from_grad(self) -> None:
        """Take over gradients that the script set or cleared in ``parameter.grad`` between backward and step.

        Raises:
            ConfigError: see :meth:`HiddenGradients.cleared`.
        """
        if self._state is _State.CONSUMED:
            return
        if cleared := self._hidden.cleared():
            self._drop(cleared)
            if self._state is _State.REDUCED:
                self.cleared |= cleared
        if self._is_scattered:
            return
        for name, is_set in self._accumulator.sync_from_grad().items():
            if is_set:
                self._used.add(name)
                self.cleared.discard(name)
            else:
                self._used.discard(name)
                self._zeros.discard(name)
                if self._state is _State.REDUCED:
                    self.cleared.add(name)

    def abort(self) -> None:
        """After an error in a step: drop its gradients and running reductions, which the next step waits for."""
        if self._reduction is not None:
            self._reduction.cancel()
        self.zero(set_to_none=False)
        self._state, self._is_open = _State.CONSUMED, False

    @contextmanager
    def stash(self) -> Iterator[None]:
        """A context in which gradients accumulate from zero and are not reduced; after it, they are as before.

        The sums are kept in host memory meanwhile.
        """
        is_shown = self._hidden.is_shown
        self._hidden.hide()
        self._hooks.enable()
        host = self._accumulator.to_host()
        used, state, is_open = set(self._used), self._state, self._is_open
        used_anywhere = self._used_anywhere
        try:
            with self.no_sync():
                self._is_stashed = self._is_open = True
                # Zeros, as the caller may read gradients before the first backward pass.
                self.zero(set_to_none=False)
                self._accumulator.zero_stale(self._accumulator.buckets)
                yield
        finally:
            self._is_stashed = False
            self._hooks.enable()
            self._used.clear()
            self._used.update(used)
            self._state, self._is_open, self._used_anywhere = state, is_open, used_anywhere
            self._accumulator.from_host(host)
            if self._is_scattered:
                self._accumulator.hide()
            if is_shown:
                self._hidden.show(self._used | self._summed)

    def scale(self, factor: float) -> None:
        """Multiply all gradients."""
        if factor != 1.0:
            with self._writing():
                for flat in self._own_flats():
                    flat.mul_(factor)

    def clamp(self, limit: float) -> None:
        """Bring every element into ``[-limit, limit]``."""
        with self._writing():
            for flat in self._own_flats():
                flat.clamp_(-limit, limit)

    @contextmanager
    def _writing(self) -> Iterator[None]:
        """A context for what the library writes, which :meth:`written` does not take for the script's."""
        is_known = self._version == self.version
        yield
        if is_known:
            self._version = self.version

    def _own_flats(self) -> list[Tensor]:
        return self._accumulator.flats(own=self._is_scattered)

    def zero(self, set_to_none: bool = True) -> None:
        """Drop all gradients; exposed ``parameter.grad`` become None, or zeros unless ``set_to_none``."""
        self._hidden.hide()
        self._hooks.enable()
        self._accumulator.reset(set_to_none)
        self._used.clear()
        self._used_anywhere = None
        self.cleared.clear()
        self._state, self._version = _State.LOCAL, self.version

    def clear(self, set_to_none: bool) -> None:
        """Drop all gradients as a script does: without ``set_to_none``, those that were there are 0 in the next step.

        So an optimizer updates their parameters by momentum and decay, whether a pass reaches them or not, until they
        are dropped with ``set_to_none``.
        """
        kept: set[str] = set()
        if not set_to_none:
            kept = self._zeros | (self.parameters.keys() - set(self.unused_parameters()))
            kept -= self._accumulator.dropped() | self._hidden.cleared()
        self.zero(set_to_none)
        self._zeros = kept
        # A step without another pass uses zeros, too.
        self._used |= {name for name in kept if self.parameters[name].requires_grad}
        if kept and not self.exposes_grad:
            self._hidden.show_zeros(kept)

    def _written_zeros(self) -> set[str]:
        """Parameters whose gradients the script has set to zeros since they were used. Waits for the device if any."""
        views = self._accumulator.views
        if not (written := self.written()):
            return set()
        # Parameters that no pass has reached show zeros, too.
        unused = set(self.unused_parameters())
        held = {name: self.parameters[name].grad for name in written}
        held = {name: one for name, one in held.items() if name not in unused or one is not views.get(name)}
        return _zeros_among({name: one for name, one in held.items() if one is not None})

    def written(self) -> list[str]:
        """Parameters whose gradients the script has set since they were used or dropped; without passes since then."""
        views = self._accumulator.views
        held = [(name, one.grad) for name, one in self.parameters.items() if one.grad is not None]
        changed = self._version != self.version
        return [
            name
            for name, gradient in held
            if not isinstance(gradient, HiddenGradient) and (changed or gradient is not views.get(name))
        ]

    def take_written(self, names: Iterable[str]) -> None:
        """Let gradients that the script has set be those of the next step, without others."""
        views = self._accumulator.views
        held = {name: self.parameters[name].grad for name in names}
        held = {name: one.clone() if one is views.get(name) else one for name, one in held.items() if one is not None}
        self.zero()
        for name, gradient in held.items():
            self.parameters[name].grad = gradient

    def consume(self) -> None:
        """Mark the gradients as used: they stay readable until the next backward pass, which starts from zero."""
        self._hidden.use()
        self._hooks.enable()
        self._state, self._version = _State.CONSUMED, self.version


def _zeros_among(tensors: Mapping[str, Tensor]) -> set[str]:
    """The names of those that are all zero. Waits for the device."""
    if not tensors:
        return set()
    flags = [one.detach().any() for one in tensors.values()]
    flags = torch.stack([one.to(flags[0].device) for one in flags]).tolist()
    return {name for name, has_numbers in zip(tensors, flags, strict=True) if not has_numbers}
