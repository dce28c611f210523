"""Bring a model's weights together on rank 0, one full tensor at a time."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from hybridpp.checkpoint.boxes import Box, full_box
from hybridpp.checkpoint.gather import gather_json
from hybridpp.checkpoint.safetensors_file import StoredSpec
from hybridpp.cluster import gather_objects
from hybridpp_plugins.agreement import agree
from hybridpp_plugins.engine import Engine
from hybridpp_plugins.rank_shares import RankShares, find_buffer_owners, held_weights, is_extra_state, state_of

SAVE_CALL = "in booster.save_model, which gathers the weights"

_Parts = Sequence[tuple[Box, Tensor]]


class WeightStream:
    """The weights of one replica, or of a copy of the model, in the dtypes that they had before boost.

    A rank has one full tensor in memory beside its own share: rank 0 that which it puts together, the others a copy of
    the part that they send. Collective: all ranks make it, and call :meth:`share` and, for the same names, rank 0
    :meth:`read` and the others :meth:`send`.

    Args:
        engine: of the model.
        copy: of the model, whose weights are taken; None: those of the model in full precision.

    Attributes:
        specs: on rank 0, of every tensor, in the order of the model's state dict; empty elsewhere.
    """

    def __init__(self, engine: Engine, copy: nn.Module | None):
        self._control = engine.layout.control
        self._dtypes = engine.original.dtypes
        self._attempt(lambda: _pull(engine, copy))
        position = find_buffer_owners(engine, SAVE_CALL, None).position
        self._parts: dict[str, tuple[Tensor, tuple[int, ...], _Parts]] = {}
        shares = RankShares(engine, position, divided=copy is None)
        self._attempt(lambda: self._parts.update(_parts(engine, copy, shares)))
        own = {
            name: [str(self._dtype(name, tensor)).removeprefix("torch."), list(shape), [list(box) for box, _ in parts]]
            for name, (tensor, shape, parts) in self._parts.items()
        }
        rows = gather_json(self._control, SAVE_CALL, own)
        found = {name: row[name] for row in reversed(rows) for name in row}
        names = [name for name in (*self._dtypes, *found) if name in found]
        self.specs = {name: StoredSpec(getattr(torch, found[name][0]), tuple(found[name][1])) for name in names}
        self._boxes: dict[str, dict[int, list[Box]]] = {name: {} for name in self.specs}
        # Of ranks that have the same, the first counts: it comes last.
        for rank, row in reversed(list(enumerate(rows))):
            for name, (_, _, boxes) in row.items():
                self._boxes[name][rank] = [Box(tuple(start), tuple(shape)) for start, shape in boxes]

    def _attempt(self, run: Callable[[], Any]) -> None:
        """Run something; a failure is one on all ranks. Collective: all ranks."""
        failure: Exception | None = None
        try:
            run()
        except Exception as error:
            failure = error
        agree(self._control, SAVE_CALL, failure, "writing the model")

    def _dtype(self, name: str, tensor: Tensor) -> torch.dtype:
        return self._dtypes.get(name, tensor.dtype)

    def share(self, files: Sequence[Sequence[str]]) -> list[list[str]]:
        """The names that rank 0 will read, by file, on every rank."""
        (shared, *_) = gather_objects(self._control, SAVE_CALL, [list(names) for names in files])
        return [list(names) for names in shared]

    def read(self, names: Iterable[str]) -> Iterator[Tensor]:
        """Yield full tensors, in host memory. Rank 0 only; whoever stops early must take the rest, too."""
        for name in names:
            yield self._read(name)

    def _read(self, name: str) -> Tensor:
        dtype, shape = self.specs[name]
        full: Tensor | None = None
        for rank, boxes in self._boxes[name].items():
            is_full = boxes == [full_box(shape)]
            if rank == 0 and is_full:
                full = self._host(name, self._parts[name][2][0][1])
                continue
            if full is None or not is_full:
                full = torch.empty(shape, dtype=dtype) if full is None else full
            values = self._packed(name) if rank == 0 else self._received(rank, dtype, boxes)
            for box, part in zip(boxes, torch.split(values, [box.size for box in boxes]), strict=True):
                full[box.slices].copy_(part.view(box.shape))
        assert full is not None, "some rank has it"
        return full

    def _received(self, rank: int, dtype: torch.dtype, boxes: Sequence[Box]) -> Tensor:
        values = torch.empty(sum(box.size for box in boxes), dtype=dtype)
        self._control.receive(values.view(torch.uint8), rank).wait()
        return values

    def send(self, names: Iterable[str]) -> None:
        """Send this rank's parts of tensors to rank 0."""
        for name in names:
            if name in self._parts:
                self._control.send(self._packed(name).view(torch.uint8), 0).wait()

    def _packed(self, name: str) -> Tensor:
        """This rank's parts of a tensor in a row."""
        return torch.cat([self._host(name, part).reshape(-1) for _, part in self._parts[name][2]])

    def _host(self, name: str, tensor: Tensor) -> Tensor:
        return tensor.detach().to(device="cpu", dtype=self._dtype(name, tensor)).contiguous()


def _pull(engine: Engine, copy: nn.Module | None) -> None:
    """Bring what is saved up to date."""
    if copy is None and engine.optimizer is not None:
        engine.optimizer.target.pull()
    elif copy is None:
        engine.masters.copy_from_model()


def _parts(
    engine: Engine, copy: nn.Module | None, shares: RankShares
) -> Iterator[tuple[str, tuple[Tensor, tuple[int, ...], _Parts]]]:
    """What this rank contributes: a tensor, its full shape, and boxes of that with views."""
    with engine.weights.internal():  # a copy has values while the model's weights are not there
        state: dict[str, Any] = state_of(engine) if copy is None else copy.state_dict()
    here = engine.layout.here
    held = (
        [(weight.name, weight.tensor) for weight in held_weights(engine)]
        if copy is None
        else [(name, state[name]) for name in state if name not in engine.original.aliases and not is_extra_state(name)]
    )
    for name, tensor in held:
        if isinstance(tensor, Tensor) and (parts := shares.parts(name, tensor, to_write=True)):
            yield name, (tensor, shares.full_shape(name, tensor), parts)
    for name, tensor in state.items():
        if is_extra_state(name) and isinstance(tensor, Tensor) and here.dp == here.tp == 0:
            yield name, (tensor, tuple(tensor.shape), [(full_box(tensor.shape), tensor)])
