"""Weights of which a replica holds one segment, except where they are used (ZeRO 3)."""

import math
from collections import defaultdict
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping
from collections.abc import Set as AbstractSet
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from hybridpp.cluster import Work
from hybridpp.data_parallel.bucket import allocate_flat, free_flat, piece_in, views_in
from hybridpp.data_parallel.flat_weights import FlatWeights, parts_of
from hybridpp.data_parallel.layout import BucketLayout, ShardLayout
from hybridpp.data_parallel.replicas import Replicas
from hybridpp.errors import ConfigError, HybridppError
from hybridpp.nn.bit_hash import bit_hash
from hybridpp.nn.metadata_functions import LIKE_SECOND, WITHOUT_VALUES, writes_first_argument
from hybridpp.nn.torch_private import (
    DisableTorchFunctionSubclass,
    current_function_mode,
    has_compatible_memory,
    pytree,
    version_of,
)

# Stands, in the place of a unit, for the weights that no unit has for itself.
_REST = -1


_DATA: Any = Tensor.data  # torch declares no property
_SAME = frozenset((_DATA.__get__, Tensor.detach))
_ALLOWED = frozenset((Tensor.requires_grad_, Tensor.detach_, Tensor.share_memory_))
# Another view, dtype or device: what they give of a weight that is not there is not there, either.
_PASSING = frozenset(
    getattr(Tensor, name)
    for name in (
        *("bfloat16", "bool", "cpu", "cuda", "double", "float", "half", "int", "long", "to", "type", "type_as"),
        *("expand", "expand_as", "flatten", "movedim", "permute", "ravel", "reshape", "reshape_as", "squeeze", "t"),
        *("transpose", "unsqueeze", "view", "view_as"),
    )
)
_VIEWS = tuple((name, getattr(Tensor, name).__get__) for name in ("H", "T", "mH", "mT"))
_PASSED_ON = _PASSING.union(getter for _, getter in _VIEWS)
# Methods of a tensor that look at no values, beside those that make what has none.
_WITHOUT_VALUES = WITHOUT_VALUES | {
    *(Tensor.as_subclass, Tensor.backward, Tensor.module_load, Tensor.record_stream, Tensor.storage),
    *(Tensor.register_post_accumulate_grad_hook, has_compatible_memory),
}
# What these give is of Python's, or numpy's.
_NUMBERS = frozenset(
    getattr(Tensor, name)
    for name in (
        *("__array__", "__bool__", "__complex__", "__dlpack__", "__float__", "__format__", "__index__", "__int__"),
        *("equal", "is_nonzero", "item", "numpy", "tolist"),
    )
)
_OPERATORS = (*("add", "and", "floordiv", "matmul", "mod", "mul"), *("or", "pow", "sub", "truediv", "xor"))
_READING = frozenset(
    (
        *("__abs__", "__array__", "__bool__", "__complex__", "__contains__", "__dlpack__", "__eq__", "__float__"),
        *("__format__", "__ge__", "__getitem__", "__gt__", "__index__", "__int__", "__invert__", "__iter__", "__le__"),
        *("__lt__", "__ne__", "__neg__", "__pos__", "__reversed__"),
        *(f"__{name}__" for name in _OPERATORS),
        *(f"__r{name}__" for name in _OPERATORS),
    )
)


def _refusal(name: str, done: str) -> ConfigError:
    how = "Read it" if done == "read" else "Write in place,"
    return ConfigError(
        f"{name} was {done} while it was not there: with zero_stage=3 replicas divide weights. {how} inside "
        "`with booster.unsharded(model):`, on every rank."
    )


class FreedTensor(Tensor):
    """The ``data`` of a parameter that is not there: NaN that takes no memory. Whoever reads or writes it is refused.

    Attributes:
        freed_name: of the parameter.
    """

    freed_name: str

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        with DisableTorchFunctionSubclass():
            first: Any = args[0] if args else next(iter(kwargs.values()), None)
            if func in _ALLOWED or func in _WITHOUT_VALUES or func is Tensor.__repr__:
                return func(*args, **kwargs)
            if func in _SAME or (func in _PASSED_ON and isinstance(first, FreedTensor)):
                made = func(*args, **kwargs)
                return made if made is first else _freed(made, first.freed_name)
            if func in LIKE_SECOND and not isinstance(first, FreedTensor):
                return func(*args, **kwargs)
            for one in pytree.tree_leaves(first) if writes_first_argument(func) else ():
                if isinstance(one, FreedTensor | FreedParameter):
                    raise _refusal(one.freed_name, "written")
            leaves = pytree.tree_leaves((args, kwargs))
            freed = next(one for one in leaves if isinstance(one, FreedTensor | FreedParameter))
            if _makes_graph(freed, func):
                return func(*args, **kwargs)
            raise _refusal(freed.freed_name, "read")


class FreedParameter(nn.Parameter):
    """A parameter that is not there: where its class is set, a plain one becomes one, and the other way round.

    Its methods that read values or write refuse, unless there is a function mode that sees the call: it gathers the
    parameter where a forward is learned, and refuses it in a criterion. What is computed with gradients is NaN: a loss
    of it is refused as one that reads weights, with advice for penalties.

    It has no ``__torch_function__``, which all reads of attributes in a step would call: so functions of torch that are
    no methods (``torch.norm(parameter)``) find NaN.

    Attributes:
        freed_name: its name.
    """

    freed_name: str

    @property
    def data(self) -> Tensor:
        """NaN that can be neither read nor written."""
        return self._without_graph(_DATA.__get__)

    @data.setter
    def data(self, value: Tensor) -> None:
        with DisableTorchFunctionSubclass():
            # Another dtype or device, as of ``module.half()``, is refused where it is used.
            is_alike = (value.dtype, value.device) == (self.dtype, self.device)
            if is_alike and value.data_ptr() != self.data_ptr():
                raise _refusal(self.freed_name, "written")
            _DATA.__set__(self, value)

    def __repr__(self) -> str:  # type: ignore[override]  # torch's takes what other tensors' do
        return f"{type(self).__name__}({self.freed_name}, shape={tuple(self.shape)}, dtype={self.dtype})"

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        # Of a model that is copied, which is refused with better advice.
        memo[id(self)] = copied = nn.Parameter(_DATA.__get__(self).clone(), self.requires_grad)
        return copied

    def detach(self) -> Tensor:
        """NaN that can be neither read nor written."""
        return self._without_graph(Tensor.detach)

    def _without_graph(self, function: Callable[[Tensor], Tensor]) -> Tensor:
        found = function(self)
        return _freed(found, self.freed_name) if type(self) is FreedParameter else found


def _guarded(function: Any, done: str) -> Any:
    """A method of freed parameters, in the place of torch's."""

    def method(self: FreedParameter, *args: Any, **kwargs: Any) -> Any:
        name, is_seen = self.freed_name, current_function_mode() is not None  # type: ignore[no-untyped-call]  # torch
        if not is_seen and (done == "written" or not _makes_graph(self, function)):
            raise _refusal(name, done)
        try:
            return function(self, *args, **kwargs)
        except RuntimeError as error:
            if done == "written" and type(self) is FreedParameter and not isinstance(error, HybridppError):
                raise _refusal(name, done) from error
            raise

    return method


def _makes_graph(tensor: Tensor, function: Any) -> bool:
    """Whether a function computes with gradients of a tensor that is not there."""
    return torch.is_grad_enabled() and tensor.requires_grad and function not in _NUMBERS


def _passing(function: Any) -> Any:
    """A method of freed parameters that reads nothing: it gives NaN that can be neither read nor written."""

    def method(self: FreedParameter, *args: Any, **kwargs: Any) -> Any:
        made = function(self, *args, **kwargs)
        return _freed(made, self.freed_name) if type(self) is FreedParameter and made is not self else made

    return method


def _guard_methods() -> None:
    for name in dir(Tensor):
        method: Any = getattr(Tensor, name)
        if not callable(method) or method in _ALLOWED or method in _WITHOUT_VALUES or method in _SAME:
            continue
        elif method in _PASSING:
            setattr(FreedParameter, name, _passing(method))
        elif writes_first_argument(method):
            setattr(FreedParameter, name, _guarded(method, "written"))
        elif name in _READING or not name.startswith("_"):
            setattr(FreedParameter, name, _guarded(method, "read"))
    for name, getter in _VIEWS:
        setattr(FreedParameter, name, property(_passing(getter)))


_guard_methods()


def _freed(tensor: Tensor, name: str) -> Tensor:
    made: Any = tensor
    made.__class__ = FreedTensor
    made.freed_name = name
    return tensor


def _there(parameter: nn.Parameter) -> None:
    """Make a plain parameter of one that has values now."""
    if type(parameter) is FreedParameter:
        del vars(parameter)["freed_name"]
        parameter.__class__ = nn.Parameter  # type: ignore[assignment]  # what it was


def give_memory(parameter: nn.Parameter, values: Tensor) -> None:
    """Let a parameter lie where ``values`` do, also one that is not there."""
    _DATA.__set__(parameter, values)
    _there(parameter)


class WeightBucket:
    """The weights of a bucket: always this replica's segment, and all of them while somebody uses them.

    While nobody does, the parameters are NaN and take no memory: to read or write them is an error
    (:class:`FreedParameter`).

    Args:
        layout: where the weights lie.
        flat: the weights.
        parameters: by name; they become NaN.
        index: of this replica's segment.

    Attributes:
        layout: as given.
        own: this replica's segment.
        written: hashes of parameters that a forward has written to as torch counts, by name.
        changed: the names of these, and of those of which this replica's piece has changed.
    """

    def __init__(self, layout: BucketLayout, flat: Tensor, parameters: Mapping[str, nn.Parameter], index: int):
        self.layout = layout
        self._flat, self._views, self._index = flat, views_in(flat, layout), index
        self.own = flat[layout.segment(index)].clone()
        # Where the parameters lie while they are there.
        self._current, self._current_views = flat, self._views
        self._parameters = {name: parameters[name] for name in self._views}
        # The others have no address.
        self._with_elements = [(name, p) for name, p in self._parameters.items() if p.numel()]
        # Torch writes to these while they are not there.
        self._with_one_element = {name: p for name, p in self._with_elements if p.numel() == 1}
        self._freed_versions: dict[str, int] = {}
        self._absent = _absent(flat)
        self._users: set[Hashable] = set()
        self.written: dict[str, Tensor] = {}
        self.changed: set[str] = set()
        # Versions of this replica's segment and of the parameters when they were gathered: what code writes since then.
        self._own_version = -1
        self._versions: dict[str, int] = {}
        # The running gather; those that were forgotten, which may still write to the buffer.
        self._work: Work | None = None
        self._cancelled: list[Work] = []
        self._free()

    def _free(self) -> None:
        for name, parameter in self._parameters.items():
            _DATA.__set__(parameter, self._absent.expand(parameter.shape))
            if type(parameter) is nn.Parameter:
                parameter.__class__ = FreedParameter
                vars(parameter)["freed_name"] = name
        self._freed_versions = {name: version_of(p) for name, p in self._with_one_element.items()}
        if self._current is self._flat:
            free_flat(self._flat)
        self._current, self._current_views = self._flat, self._views

    @property
    def is_used(self) -> bool:
        """Whether somebody uses the weights."""
        return bool(self._users)

    def start(
        self,
        user: Hashable,
        group: Replicas,
        *,
        apart: bool = False,
        overdue: AbstractSet[Hashable] = frozenset(),
    ) -> None:
        """Start to gather the weights for a user, unless they are there. Collective: the group, if nobody uses them.

        Args:
            user: ends the use with :meth:`release`.
            group: the replicas.
            apart: whether in memory of their own, which tensors that lie there keep alive.
            overdue: users that have ended on other replicas; where there are only such, those gather again, so that
                this one takes part, and gets what it has.

        Raises:
            ConfigError: the script has given a parameter other memory.
        """
        if not self._users:
            self.check_unmoved()
            self._check_unwritten()
            while self._cancelled:
                self._cancelled.pop().wait()
            if apart:
                self._current = torch.zeros(self.layout.size, dtype=self.own.dtype, device=self.own.device)
                self._current_views = views_in(self._current, self.layout)
            else:
                allocate_flat(self._flat)
            self._current[self.layout.segment(self._index)] = self.own
            self._work = group.all_gather_segments(self._current)
        elif overdue and self._users <= overdue:
            self.wait()
            self._work = group.all_gather_segments(self._current)
        self._users.add(user)

    def check_unmoved(self) -> None:
        """Refuse parameters that lie elsewhere.

        Raises:
            ConfigError: the script has given a parameter other memory.
        """
        for name in self.moved():
            raise ConfigError(
                f"{name} was given other memory after booster.boost ({name}.data = ..., or model.to(...)): with "
                "zero_stage=3 replicas divide weights, so it would not be used. Write in place, inside `with "
                "booster.unsharded(model):`, on every rank."
            )

    def _check_unwritten(self) -> None:
        """Refuse what was written where parameters are not there: functions of lists can, to one element."""
        before = self._freed_versions
        self._freed_versions = {name: version_of(p) for name, p in self._with_one_element.items()}
        for name, version in self._freed_versions.items():
            if version != before[name]:
                raise _refusal(name, "written")
        if self._absent.device.type == "cpu" and self._absent.is_floating_point() and not math.isnan(self._absent):
            self._absent.fill_(math.nan)
            raise _refusal(f"{self.layout.slots[0].name}, or one beside it,", "written")

    def wait(self) -> None:
        """Wait until the weights are there."""
        if self._work is not None:
            self._work.wait()
            self._work = None
            for name, parameter in self._parameters.items():
                _there(parameter)
                parameter.data = self._current_views[name]
            self._note_versions()

    def release(self, user: Hashable, *, drops_writes: bool = False) -> None:
        """End a use; the last one frees the weights, and keeps what was written to them unless it ``drops_writes``.

        Raises:
            ConfigError: the script has given a parameter other memory.
        """
        if user in self._users:
            is_last = len(self._users) == 1
            try:
                if is_last:
                    self.wait()
                if is_last and not drops_writes:
                    self.keep_written()
            finally:
                self._users.remove(user)
                if is_last:
                    self._free()

    def keep_written(self) -> None:
        """Take over what a forward has written to weights that are there: the same on all replicas.

        Raises:
            ConfigError: the script has given a parameter other memory.
        """
        # Weights from before an update are old.
        if not self._users or self._work is not None or self._own_version != version_of(self.own):
            return
        self.check_unmoved()
        segment = self._current[self.layout.segment(self._index)]
        counted = {name for name, p in self._parameters.items() if version_of(p) != self._versions[name]}
        written = set(counted)
        if self.own.device.type == "cpu":  # elsewhere the host does not wait, so that only what torch counts is seen
            for piece in self.layout.pieces_within(self._index) if not torch.equal(segment, self.own) else ():
                if not torch.equal(piece_in(segment, piece), piece_in(self.own, piece)):
                    written.add(piece.name)
        if written:
            self.written |= {name: bit_hash(self._parameters[name]) for name in counted}
            self.changed |= written
            self.own.copy_(segment)
            self._note_versions()

    def _note_versions(self) -> None:
        self._own_version = version_of(self.own)
        self._versions = {name: version_of(parameter) for name, parameter in self._parameters.items()}

    def note_update(self) -> None:
        """The weights that are there are from before an update."""
        self._own_version = -1

    def parameters(self) -> Iterable[nn.Parameter]:
        """Those that lie here."""
        return self._parameters.values()

    def holds_memory_of(self, tensor: Tensor) -> bool:
        """Whether a tensor lies in the buffer."""
        return tensor.untyped_storage().data_ptr() == self._current.untyped_storage().data_ptr()

    def keep(self) -> bool:
        """Take over what was written to the weights, in this replica's segment.

        Returns:
            Whether that was as it was when they were gathered; else what was written to it is lost.
        """
        is_unwritten = self._own_version == version_of(self.own)
        self.own.copy_(self._current[self.layout.segment(self._index)])
        self._note_versions()
        return is_unwritten

    def cancel(self) -> None:
        """Forget all uses after an error, without waiting for other replicas."""
        if self._users:
            self._users.clear()
            if self._work is None:
                self._free()
            else:
                self._cancelled.append(self._work)
                self._work = None

    def moved(self) -> Iterator[str]:
        """Parameters that the script has given other memory."""
        is_there = self.is_used and self._work is None
        for name, parameter in self._with_elements:
            if parameter.data_ptr() != (self._current_views[name] if is_there else self._absent).data_ptr():
                yield name


def _no_units(*, backward: bool) -> None:
    raise AssertionError("weights are gathered by stage")


def _absent(like: Tensor) -> Tensor:
    """One element that stands for those of weights that are not there."""
    value = torch.nan if like.is_floating_point() else 0
    return torch.full((), value, dtype=like.dtype, device=like.device)


class ShardedWeights(FlatWeights):
    """Weights that are gathered from all replicas for the stages that use them, and freed after.

    Args:
        layout, parameters, group, device, move: as of :class:`FlatWeights`, for trainable weights.
        frozen_layout, frozen: the same for frozen ones.

    Attributes:
        frozen_pieces: what this replica has of frozen weights, by name.
        frozen_names: the names of all frozen weights.
        gather_as_others: takes part in the gathers of a pass that other replicas run and this one does not, of units:
            ``gather_as_others(backward=...)``.
        after_cancel, after_update: called by :meth:`cancel` and :meth:`gather`; None: nothing is.
    """

    gathers_where_used = True

    def __init__(
        self,
        layout: ShardLayout,
        parameters: Mapping[str, nn.Parameter],
        group: Replicas,
        device: torch.device,
        move: Callable[[nn.Parameter, Tensor], None],
        frozen_layout: ShardLayout,
        frozen: Mapping[str, nn.Parameter],
    ):
        self._buckets: list[WeightBucket] = []
        super().__init__(layout, parameters, group, device, move)
        self._own_parts = dict(self.pieces)
        for bucket in frozen_layout.buckets:
            flat = torch.zeros(bucket.size, dtype=frozen[bucket.slots[0].name].dtype, device=device)
            for name, view in views_in(flat, bucket).items():
                move(frozen[name], view)
            self._own_parts |= self._sharded(bucket, flat, frozen)
        self._all_parts = self.parts | parts_of(frozen_layout, frozen)
        self.frozen_pieces = frozen_layout.pieces
        self._names, self.frozen_names = frozenset((*parameters, *frozen)), frozenset(frozen)
        self._number_of = {id(p): number for number, one in enumerate(self._buckets) for p in one.parameters()}
        self._of_unit: dict[int, list[WeightBucket]] = defaultdict(list)
        for one in self._buckets:
            for unit in one.layout.units or (_REST,):
                self._of_unit[unit].append(one)
        self._depth, self._is_internal = 0, False
        # Buckets of which the script has written to this replica's pieces inside of :meth:`unsharded`.
        self._lost: list[BucketLayout] = []
        self.gather_as_others: Callable[..., None] = _no_units
        self.after_cancel: Callable[[], None] | None = None
        self.after_update: Callable[[], None] | None = None

    def _hold(self, bucket: BucketLayout, flat: Tensor, parameters: Mapping[str, nn.Parameter]) -> None:
        self.pieces |= self._sharded(bucket, flat, parameters)

    def _sharded(self, layout: BucketLayout, flat: Tensor, parameters: Mapping[str, nn.Parameter]) -> dict[str, Tensor]:
        """Keep a bucket with weights; returns views of this replica's pieces, by name."""
        bucket = WeightBucket(layout, flat, parameters, self._layout.index)
        self._buckets.append(bucket)
        return {piece.name: piece_in(bucket.own, piece) for piece in layout.pieces_within(self._layout.index)}

    def gather(self) -> None:
        """Free weights that are still there, and are old now. The new ones are gathered where they are used."""
        self.refuse_inside()
        for bucket in self._buckets:
            bucket.note_update()
        if self.after_update is not None:
            self.after_update()

    def unshard(self, stage: int) -> None:
        """Start to gather the weights of a stage, except for those that units gather. Collective: all replicas."""
        for bucket in self._of(stage):
            bucket.start(stage, self._group)

    def wait(self, stage: int) -> None:
        """Wait until the weights of a stage are there."""
        for bucket in self._of(stage):
            bucket.wait()

    def reshard(self, stage: int) -> None:
        """Free the weights of a stage, unless another one uses them."""
        for bucket in self._of(stage):
            bucket.release(stage)

    def _of(self, stage: int) -> Iterable[WeightBucket]:
        return (bucket for bucket in self._of_unit[_REST] if stage in bucket.layout.stages)

    def start_unit(self, unit: int, user: Hashable, overdue: AbstractSet[Hashable] = frozenset()) -> None:
        """Start to gather the weights of a unit for a user; -1: of all that no unit has.

        Collective: all replicas, unless others than ``overdue`` use them.
        """
        for bucket in self._of_unit[unit]:
            bucket.start(user, self._group, overdue=overdue)

    def is_there(self, unit: int) -> bool:
        """Whether the weights of a unit are there, so that nothing gathers them."""
        return all(bucket.is_used for bucket in self._of_unit[unit])

    def wait_unit(self, unit: int) -> None:
        """Wait until they are there."""
        for bucket in self._of_unit[unit]:
            bucket.wait()

    def release_unit(self, unit: int, user: Hashable) -> None:
        """End a use; the last one frees them."""
        for bucket in self._of_unit[unit]:
            bucket.release(user)

    def shares_memory(self, unit: int, tensor: Tensor) -> bool:
        """Whether a tensor lies in the buffers of a unit's weights."""
        return any(bucket.holds_memory_of(tensor) for bucket in self._of_unit[unit])

    def absent_part(self, parameter: nn.Parameter) -> int | None:
        """The number of the part that a parameter is gathered with, the same on all replicas; None: it is there."""
        number = self._number_of.get(id(parameter))
        return None if number is None or self._buckets[number].is_used else number

    def move_to_rest(self, part: int, user: Hashable) -> Collection[str]:
        """Gather a part for a user, and later with the rest, unless it is. Collective: all replicas.

        Returns:
            The names of all parameters that moved with it.
        """
        bucket = self._buckets[part]
        if bucket in self._of_unit[_REST]:
            return ()
        bucket.start(user, self._group)
        bucket.wait()
        return self._move_to_rest([bucket])

    def move_unit_to_rest(self, unit: int) -> Collection[str]:
        """Gather a unit's weights with the rest from now on; returns the names of its parameters."""
        return self._move_to_rest([] if unit == _REST else list(self._of_unit[unit]))

    def _move_to_rest(self, moved: Iterable[WeightBucket]) -> list[str]:
        names = []
        for bucket in moved:
            for buckets in self._of_unit.values():
                if bucket in buckets:
                    buckets.remove(bucket)
            self._of_unit[_REST].append(bucket)
            names += [slot.name for slot in bucket.layout.slots]
        return names

    @contextmanager
    def unsharded(self) -> Iterator[None]:
        """A context in which all weights of this rank are there, and what is written to them is kept.

        All replicas must write the same. Collective: all replicas.

        Raises:
            ConfigError: at its end, where the script has given a parameter other memory.
        """
        self._depth += 1
        user = ("unsharded", self._depth)
        try:
            for bucket in self._buckets:
                bucket.start(user, self._group, apart=True)
            for bucket in self._buckets:
                bucket.wait()
            yield
            for bucket in self._buckets:
                bucket.check_unmoved()
            self._lost += [bucket.layout for bucket in self._buckets if not bucket.keep()]
        finally:
            self._depth -= 1
            for bucket in self._buckets:
                bucket.release(user, drops_writes=True)

    def refuse_inside(self) -> None:
        """Refuse to change this replica's parts inside of :meth:`unsharded`, whose weights would overwrite them.

        Raises:
            ConfigError: it is running.
        """
        if self._depth:
            raise ConfigError(
                "inside booster.unsharded, the weights that are there are kept at the end, and would undo "
                "optimizer.step(), booster.load_model and booster.resume. Call these, and save, after the block."
            )

    @property
    def is_readable(self) -> bool:
        """Whether all weights are there, or the reader knows that they may not be."""
        return self._depth > 0 or self._is_internal

    @contextmanager
    def internal(self) -> Iterator[None]:
        """A context in which the library itself lists parameters, whether or not they have values."""
        previous, self._is_internal = self._is_internal, True
        try:
            yield
        finally:
            self._is_internal = previous

    def take_written(self) -> dict[str, Tensor]:
        """Hashes of trained parameters that a forward has written to since the last call, by name, as torch counts.

        They are equal where replicas have written alike.
        """
        found: dict[str, Tensor] = {}
        for bucket in self._buckets:
            found |= {name: bucket.written[name] for name in bucket.written.keys() - self.frozen_names}
            bucket.written.clear()
        return found

    def take_changed(self) -> set[str]:
        """The names of frozen parameters that a forward has written to, as far as this replica sees."""
        found: set[str] = set()
        for bucket in self._buckets:
            found |= bucket.changed & self.frozen_names
            bucket.changed.clear()
        return found

    def holds(self, name: str) -> bool:
        """Whether a parameter is sharded."""
        return name in self._names

    def own_parts(self) -> Mapping[str, Tensor]:
        """Views of this replica's parts of all parameters, by name, trainable and frozen."""
        return self._own_parts

    def assign(self, name: str, value: Tensor) -> None:
        """Set a parameter to a tensor of its shape, outside of :meth:`unsharded`."""
        if name in self._own_parts:
            self._own_parts[name].copy_(self._all_parts[name](value))

    def cancel(self) -> None:
        """After an error in a step: forget uses, without waiting for other replicas."""
        for bucket in self._buckets:
            bucket.cancel()
        if self.after_cancel is not None:
            self.after_cancel()

    def moved(self) -> Iterator[str]:
        self.refuse_inside()
        for bucket in self._buckets:
            yield from bucket.moved()
            bucket.keep_written()

    def lost(self, written: Iterable[str]) -> Iterator[str]:
        # Outside of :meth:`unsharded` there is nothing but the pieces.
        while self._lost:
            yield next(self._lost.pop().pieces_within(self._layout.index)).name
