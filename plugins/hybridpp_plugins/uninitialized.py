"""The weights of a model that was boosted on the meta device and that have no values yet."""

import math
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from hybridpp.cluster import Group, gather_objects
from hybridpp.data_parallel import ShardedWeights
from hybridpp.errors import ConfigError, some_of
from hybridpp.module_adapter import ModuleAdapter
from hybridpp.nn.torch_private import version_of
from hybridpp.precision import MasterWeights

_MARKED = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


class _Empty(NamedTuple):
    """A tensor without values, with what shows that it has been written to.

    Attributes:
        tensor: of the model.
        version: its version counter.
        address: of its memory.
        is_marked: whether its first element is NaN, to detect writes through ``.data`` (``weight.data.normal_()``).
        is_part: whether it is this replica's part of a weight, whose version changes with those of others.
    """

    tensor: Tensor
    version: int
    address: int
    is_marked: bool
    is_part: bool

    @classmethod
    def mark(cls, tensor: Tensor, is_part: bool) -> "_Empty":
        is_marked = tensor.dtype in _MARKED and tensor.numel() > 0
        if is_marked:
            _first(tensor).fill_(math.nan)
        return cls(tensor, version_of(tensor), tensor.data_ptr(), is_marked, is_part)

    def is_written(self, now: Tensor | None) -> bool:
        """Whether the tensor that is in the model ``now`` has values."""
        if now is not self.tensor or now.data_ptr() != self.address:
            return True
        if version_of(now) != self.version and not (self.is_part and self.is_marked):
            return True
        return self.is_marked and not bool(_first(now).isnan())


def _first(tensor: Tensor) -> Tensor:
    # A view for any order of dimensions in memory.
    return tensor.detach().as_strided((1,), (1,), tensor.storage_offset())


class UninitializedWeights:
    """Weights that must be loaded, or set by the script, before the first step.

    Args:
        names: of the complete model's weights: the same on every rank, so that all ranks fail or none.

    Attributes:
        is_pending: whether weights are missing; the same on every rank.
    """

    def __init__(self, names: Iterable[str]):
        self._names = set(names)
        self.is_pending = bool(self._names)
        self._loaded = False
        self._empty: dict[str, _Empty] = {}
        self._model = nn.Module()
        self._masters = MasterWeights({})
        self._sharded: ShardedWeights | None = None
        self._hook: RemovableHandle | None = None

    @torch.no_grad()
    def watch(self, adapter: ModuleAdapter, masters: MasterWeights, sharded: ShardedWeights | None) -> None:
        """Watch the model, whose memory is allocated now, for writes; refuse calls of it while weights are missing."""
        if not self._names:
            return
        self._model, self._masters, self._sharded = adapter.model, masters, sharded
        self.mark(self._names)
        handle = self._model.register_forward_pre_hook(self._before_forward)
        self._hook = adapter.hooked(self._model, "hook that refuses weights without values", handle)

    @torch.no_grad()
    def mark(self, names: Collection[str]) -> None:
        """Mark these weights of this rank as having no values."""
        if names:
            self._empty |= {n: _Empty.mark(leaf, self._is_part(n)) for n, leaf in self._now().items() if n in names}

    def lacking(self) -> set[str]:
        """This rank's weights without values."""
        self._take_over()
        return set(self._empty)

    def _now(self) -> dict[str, Tensor]:
        with nullcontext() if self._sharded is None else self._sharded.internal():
            state = self._model.state_dict(keep_vars=True)
        now = {n: leaf for n, leaf in state.items() if isinstance(leaf, Tensor) and not self._is_part(n)}
        return now if self._sharded is None else {**now, **self._sharded.own_parts()}

    def _is_part(self, name: str) -> bool:
        return self._sharded is not None and self._sharded.holds(name)

    def _before_forward(self, *_: object) -> None:
        self.check()

    @contextmanager
    def kept_on_failure(self) -> Iterator[None]:
        """A context in which weights are written: if it fails, those that had no values still have none."""
        lacking = self.lacking()
        try:
            yield
        except BaseException:
            self.mark(lacking)
            raise

    def fill(self, names: Iterable[str]) -> None:
        """Note the weights that were loaded from a folder."""
        self._loaded = True
        self._forget(set(names))

    def _forget(self, names: set[str]) -> None:
        self._names -= names
        self.is_pending = bool(self._names)
        for name in names:
            self._empty.pop(name, None)
        if not self._names:
            self._model, self._masters, self._sharded = nn.Module(), MasterWeights({}), None
            if self._hook is not None:
                self._hook.remove()

    def check(self, control: Group | None = None) -> None:
        """Refuse to use weights without values. Collective: all ranks of ``control``, if it is given.

        Without ``control``, only this rank's weights are checked, and again at the next call.

        Raises:
            ConfigError: a weight has no value; with ``control``, on any rank.
        """
        if not self._names:
            return
        self._take_over()
        missing = set(self._empty)
        if control is not None:
            rows = gather_objects(control, "at the first use of a model from the meta device", sorted(missing))
            missing = {name for names in rows for name in names}
        if missing:
            raise ConfigError(self._message(missing))
        if control is not None:
            self._forget(set(self._names))

    def _take_over(self) -> None:
        """Copy what the script has written to the masters."""
        if not self._empty:
            return
        now = self._now()
        for name in [name for name, empty in self._empty.items() if empty.is_written(now.get(name))]:
            del self._empty[name]
            master, value = self._masters.masters.get(name), now[name].detach()
            # A master that rounds to the written value may be more precise (from an optimizer's state).
            if master is not None and not self._is_part(name) and not self._masters.rounds_to(name, value):
                self._masters.set(name, value)

    def _message(self, missing: set[str]) -> str:
        if missing == self._names and not self._loaded:
            return (
                "the model was boosted on the meta device and its weights have no values yet. Call booster.load_model("
                "model, folder) first, or write to all of its weights and buffers."
            )
        source = "are not in the folder that was loaded" if self._loaded else "were not written to"
        return (
            f"some weights of a model that was boosted on the meta device have no values, because they {source}: "
            f"{some_of(sorted(missing))}. Call booster.load_model(model, folder) with a folder that holds them, "
            "write to them, or boost a model with weights."
        )
