"""Buffers and frozen parameters that forward passes write to: on every replica, those of the first."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from hybridpp.cluster import Group
from hybridpp.data_parallel.sharded_weights import ShardedWeights
from hybridpp.errors import ConfigError
from hybridpp.nn import walk
from hybridpp.nn.bit_hash import bit_hash
from hybridpp.nn.names import qualified
from hybridpp.nn.torch_private import (
    NormWithStatistics,
    buffers_of,
    has_no_data,
    parameters_of,
    transient_buffers_of,
    version_of,
)

# In the place of a dtype: of parameters that are not sent.
_DIVIDED, _TRAINED = "divided", "trained "


class _Owner(NamedTuple):
    """The module that a buffer or parameter is registered in; a forward may register another tensor."""

    module: nn.Module
    key: str

    @property
    def buffer(self) -> Tensor | None:
        held = buffers_of(self.module)
        return held[self.key] if self.key in held else parameters_of(self.module).get(self.key)


class BufferBroadcast:
    """Sends the first replica's buffers to the others, as DistributedDataParallel does.

    Only persistent buffers that a forward pass has written to on some replica are sent, all in one message. Replicas
    agree on them, because whether one writes may depend on its data. Batch normalisation has its own rule
    (``running_statistics.py``). Parameters that are not trained (a codebook that follows its inputs) are sent alike;
    those that are trained, and that a forward has written to, must have the same values.

    Writes through ``buffer.data`` are found in the first step only, in which values are compared.

    Args:
        model: this rank's part of the model.
        group: the ranks that hold the same part of other replicas.
        with_buffers: whether buffers are sent; else parameters only.
        sharded: the weights, of which each replica has a part (ZeRO 3): they cannot be sent; else None.

    Attributes:
        has_buffers: whether there is a buffer that could differ between replicas.
        has_candidates: whether there is a buffer or a parameter that could.
    """

    def __init__(
        self,
        model: nn.Module,
        group: Group,
        *,
        with_buffers: bool = True,
        sharded: ShardedWeights | None = None,
    ):
        self._group, self._sharded = group, sharded
        self._divided = frozenset[str]() if sharded is None else sharded.frozen_names
        self._owners = dict(_others(model)) if group.size > 1 and with_buffers else {}
        self.has_buffers = bool(self._owners)
        frozen = dict(_frozen(model)) if group.size > 1 else {}
        self._frozen = frozen.keys() - self._divided
        trained = walk.named_parameters(model) if group.size > 1 else ()
        self._trained = {name: parameter for name, parameter in trained if parameter.requires_grad}
        self._versions: list[int] = []
        # Hashes of what forwards have written to them, where these are known.
        self._forward_wrote: dict[str, Tensor] = {}
        self._owners |= {name: frozen[name] for name in frozen if name in self._frozen}
        # Frozen parameters may be most of a model: of these, hashes are kept, not copies.
        self._hashes: dict[str, Tensor] = {}
        self._agreed: list[str] = []
        self._before: dict[str, tuple[Tensor, int]] = {}
        self._copies: dict[str, Tensor] | None = None
        self._is_first = True
        self._written: set[str] = set()
        self._shapes: dict[str, tuple[torch.Size, torch.dtype]] = {}
        self.has_candidates = bool(self._owners or self._divided)
        self.note()

    def begin(self) -> None:
        """Call before the forward passes of a training step. Nothing is communicated."""
        self.note()
        if self._is_first and self._copies is None:
            found = {name: buffer for name, buffer in self._buffers().items() if not has_no_data(buffer)}
            self._hashes = {name: bit_hash(found.pop(name)) for name in self._frozen & found.keys()}
            self._copies = {name: buffer.detach().clone() for name, buffer in found.items()}

    def begin_forward(self) -> None:
        """Call before forward passes: what they write to trained parameters must be the same on all replicas.

        What a script has written to others since the last pass, as to a target network, is no pass's.
        """
        for name, (buffer, version) in self._before.items():
            if version_of(buffer) != version:
                self._before[name] = buffer, version_of(buffer)
        self._versions = [version_of(parameter) for parameter in self._trained.values()]

    def end_forward(self) -> None:
        """Call after them, before an update."""
        for (name, parameter), version in zip(self._trained.items(), self._versions, strict=False):
            if version_of(parameter) != version and not has_no_data(parameter):
                self._written.add(name)
        self._written.update(name for name, (buffer, version) in self._before.items() if version_of(buffer) != version)

    def note(self) -> None:
        """Let what was written so far count as no pass's."""
        self._before = {
            name: (buffer, version_of(buffer))
            for name, buffer in self._buffers().items()
            if name not in self._agreed and not buffer.is_inference()
        }

    def _buffers(self) -> dict[str, Tensor]:
        found = {name: owner.buffer for name, owner in self._owners.items()}
        # Sparse ones have no bytes that could be compared and sent.
        return {name: buffer for name, buffer in found.items() if buffer is not None and buffer.layout is torch.strided}

    def finish(self) -> None:
        """Send what was agreed on, after the backward passes. Collective: the group, one all-reduce, or none.

        Raises:
            ConfigError: a forward has replaced such a buffer by one of another shape.
        """
        copies, self._copies = self._copies, None
        hashes, self._hashes = self._hashes, {}
        self._is_first = False
        if self._sharded is not None:
            self._forward_wrote |= self._sharded.take_written()
            self._written |= self._forward_wrote.keys() | self._sharded.take_changed()
        now = self._buffers()
        for name, (before, version) in self._before.items():
            buffer = now.get(name)
            if buffer is None:
                continue
            same = buffer is before and version_of(buffer) == version
            if same and copies is not None and name in copies:
                same = torch.equal(copies[name], buffer)
            if same and name in hashes:
                same = torch.equal(hashes[name], bit_hash(buffer))
            if not same:
                self._written.add(name)
        self._send()

    @property
    def wants_agreement(self) -> bool:
        """Whether this replica has written to a buffer that replicas have not agreed on."""
        return bool(self._written)

    def described(self) -> dict[str, Any]:
        """Of each buffer that could differ, by name: its shape, its dtype, and whether it is to be sent."""
        chosen = self._written.union(self._agreed)
        found = {name: [list(one.shape), str(one.dtype), name in chosen] for name, one in self._buffers().items()}
        for name in self._written:
            if name in self._divided:
                found[name] = [[], _DIVIDED, True]
            elif name in self._trained:
                written = self._forward_wrote.get(name)
                written = bit_hash(self._trained[name]) if written is None else written
                found[name] = [[], f"{_TRAINED}{int(written)}", True]
        return found

    def agree(self, names: Sequence[str]) -> None:
        """Send these buffers from now on, and at once. Collective: the group, with the same names."""
        now = self._buffers()
        # By size of an element, so that each lies aligned in the message.
        self._agreed = sorted(names, key=lambda name: (-now[name].dtype.itemsize, name))
        self._shapes = {name: (now[name].shape, now[name].dtype) for name in names}
        self._written.clear()
        self._forward_wrote.clear()
        self._send()

    @torch.no_grad()
    def _send(self) -> None:
        if not self._agreed:
            return
        now = self._buffers()
        for name in self._agreed:
            if name not in now or (now[name].shape, now[name].dtype) != self._shapes[name]:
                raise ConfigError(
                    f"the buffer {name} has another shape or dtype than in earlier steps, so it cannot be sent to "
                    "other replicas. Write to it in place, register it with persistent=False, or set "
                    "broadcast_buffers=False."
                )
        parts = [_bytes_of(now[name]) for name in self._agreed]
        message = torch.cat(parts)
        if self._group.rank:
            message.zero_()
        # A sum, in which one summand is not zero.
        self._group.all_reduce(message).wait()
        for name, part in zip(self._agreed, torch.split(message, [part.numel() for part in parts]), strict=True):
            now[name].copy_(part.view(now[name].dtype).view(now[name].shape))


def _bytes_of(buffer: Tensor) -> Tensor:
    return buffer.detach().resolve_conj().resolve_neg().reshape(-1).view(torch.uint8)


def buffers_to_send(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """The buffers that replicas agree to send, given what each describes.

    Raises:
        ConfigError: one of them has different shapes on replicas, or each replica has a part of it; or a parameter
            that is trained has other values on replicas.
    """
    names = sorted({name for row in rows for name, (*_, is_chosen) in row.items() if is_chosen})
    trained = {name for name in names if any(row.get(name, ("", ""))[1].startswith(_TRAINED) for row in rows)}
    for name in sorted(trained):
        if len({str(row.get(name)) for row in rows}) > 1:
            raise ConfigError(
                f"{name} is trained, and the forward writes to it by the samples of each replica "
                "(nn.Embedding(max_norm=...), which scales the rows that it looks up): replicas would train apart. "
                "Write to all of it in the script instead, after optimizer.step() and under torch.no_grad() "
                "(weight.renorm_(2, 0, max_norm)), or use dp_size=1."
            )
    names = [name for name in names if name not in trained]
    for name in names:
        if any(row.get(name, ("", ""))[1] == _DIVIDED for row in rows):
            raise ConfigError(
                f"{name} is a parameter that is not trained, and the forward writes to it: with zero_stage=3 replicas "
                "have parts of it, to which each writes what it makes of its own data. Register it as a buffer, of "
                "which every replica takes the first one's after a step, or use zero_stage <= 2, which does so, too."
            )
        shapes = [row[name][:2] if name in row else None for row in rows]
        if any(shape != shapes[0] for shape in shapes):
            raise ConfigError(
                f"the buffer {name} differs in shape or dtype between replicas after a step ("
                f"{', '.join(_shape_in_words(shape) for shape in shapes)}), so that of the first cannot be sent to the "
                "others. Register it with persistent=False, or set broadcast_buffers=False."
            )
    return names


def _shape_in_words(shape: Any) -> str:
    return "none" if shape is None else f"{tuple(shape[0])} {shape[1]}"


def _others(model: nn.Module) -> Iterator[tuple[str, _Owner]]:
    """Persistent buffers that are no running statistics, each once."""
    seen: set[int] = set()
    for prefix, module in walk.named_modules(model):
        if not isinstance(module, NormWithStatistics):
            for key in _persistent(module):
                buffer = buffers_of(module)[key]
                if id(buffer) not in seen:
                    seen.add(id(buffer))
                    yield qualified(prefix, key), _Owner(module, key)


def _persistent(module: nn.Module) -> Iterable[str]:
    transient = transient_buffers_of(module)
    return [key for key, buffer in buffers_of(module).items() if buffer is not None and key not in transient]


def _frozen(model: nn.Module) -> Iterator[tuple[str, _Owner]]:
    """Parameters that are not trained, each once."""
    seen: set[int] = set()
    for prefix, module in walk.named_modules(model):
        for key, parameter in parameters_of(module).items():
            if parameter is not None and not parameter.requires_grad and id(parameter) not in seen:
                seen.add(id(parameter))
                yield qualified(prefix, key), _Owner(module, key)
