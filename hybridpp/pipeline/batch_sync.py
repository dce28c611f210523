"""Before a step, all ranks exchange what batch they hold, so that every rank detects any problem with the data."""

import zlib
from collections.abc import Callable, Iterator
from dataclasses import astuple, dataclass
from typing import Any

import torch
from torch import Tensor

from hybridpp.cluster import Group
from hybridpp.errors import ConfigError, DataError, PeerError
from hybridpp.nn.torch_private import pytree
from hybridpp.pipeline.batch import SplitBatch, to_plain_containers

_READY, _EXHAUSTED, _FAILED = 0.0, 1.0, 2.0
# Of larger tensors, this many evenly spaced elements are compared: enough to distinguish two batches.
_MAX_COMPARED = 4096


@dataclass(frozen=True)
class RankBatchInfo:
    """The batch of one rank before a step.

    Attributes:
        status: ready, out of data, or failed.
        num_items: number of items that the batch's loss is a mean over.
        num_microbatches: number of micro-batches.
        digest: of the batch, equal on ranks that hold the same batch; 0 if digests are not compared.
        training: 1 if gradients are enabled.
    """

    status: float
    num_items: float = 0.0
    num_microbatches: float = 0.0
    digest: float = 0.0
    training: float = 0.0


def read_batch(data_iter: Iterator[Any]) -> Any:
    """The next batch, in containers that torch's pytree supports.

    Raises:
        DataError: ``data_iter`` is no iterator, or yields no batch.
        StopIteration: the data has ended.
    """
    if not hasattr(data_iter, "__next__"):
        raise DataError(f"execute_pipeline takes an iterator: got {type(data_iter).__name__}. Pass iter(dataloader).")
    return to_plain_containers(next(data_iter))


def sync_batch(
    control: Group,
    pipelines: tuple[tuple[int, ...], ...],
    training: bool,
    prepare: Callable[[], SplitBatch],
    compare: bool = False,
) -> tuple[SplitBatch, list[RankBatchInfo]]:
    """Read this rank's batch, and check that all ranks can run a step.

    Collective: every rank of ``control``; one small all-gather of host memory.

    Args:
        control: all ranks of the world.
        pipelines: groups of ranks that must hold the same batch; batches are compared if a group has several ranks.
        training: whether gradients are enabled on this rank.
        prepare: reads and splits this rank's batch.
        compare: whether to compute digests even if every group is a single rank.

    Returns:
        This rank's batch, and every rank's info, by rank.

    Raises:
        StopIteration: every rank is out of data.
        DataError: some ranks are out of data, or the ranks of a pipeline hold different batches.
        PeerError: reading failed on other ranks; their own error says why.
        Exception: what ``prepare`` raised, on the rank that raised it.
    """
    batch = SplitBatch()
    failure: BaseException | None = None
    try:
        batch = prepare()
        is_looked_at = compare or any(len(ranks) > 1 for ranks in pipelines)
        digest = float(_digest(batch.full_batch)) if is_looked_at else 0.0
        mine = RankBatchInfo(_READY, batch.num_items, float(len(batch.microbatches)), digest, float(training))
    except StopIteration as error:
        failure, mine = error, RankBatchInfo(_EXHAUSTED)
    except Exception as error:
        failure, mine = error, RankBatchInfo(_FAILED)
    gathered = control.all_gather(torch.tensor(astuple(mine), dtype=torch.float64))
    batch_infos = [RankBatchInfo(*row.tolist()) for row in gathered]
    if failure is not None and not isinstance(failure, StopIteration):
        raise failure
    _check(batch_infos, pipelines)
    if failure is not None:
        raise failure
    if sum(info.num_items for info in batch_infos) == 0:
        raise DataError(
            "the criterion counts no items in any replica's batch, so its mean is not defined. "
            "Check criterion.num_items and the labels."
        )
    return batch, batch_infos


def _check(batch_infos: list[RankBatchInfo], pipelines: tuple[tuple[int, ...], ...]) -> None:
    failed = [rank for rank, info in enumerate(batch_infos) if info.status == _FAILED]
    if failed:
        raise PeerError(f"reading the batch failed on {_ranks(failed)}. See the error printed there.")
    exhausted = [rank for rank, info in enumerate(batch_infos) if info.status == _EXHAUSTED]
    if exhausted and len(exhausted) < len(batch_infos):
        raise DataError(
            f"the data ended on {_ranks(exhausted)} but not on the others. Give every rank an iterator of the same "
            "length: use plugin.prepare_dataloader, and take len(dataloader) steps."
        )
    for ranks in pipelines:
        if len({batch_infos[rank].digest for rank in ranks}) > 1:
            raise DataError(
                f"the ranks of one pipeline must hold the same batch: {_ranks(ranks)} hold different ones. "
                "Use plugin.prepare_dataloader, or seed the sampler and the transforms alike on all of them."
            )
    if len({info.training for info in batch_infos}) > 1:
        wanting = [rank for rank, info in enumerate(batch_infos) if info.training]
        raise ConfigError(
            f"gradients must be enabled on all ranks or on none: they are enabled on {_ranks(wanting)} only. "
            "Call execute_pipeline under torch.no_grad() on every rank, or on none."
        )


def _ranks(ranks: list[int] | tuple[int, ...]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


def _digest(inputs: Any) -> int:
    texts, tensors = [], []
    for leaf in pytree.tree_leaves(inputs):
        if isinstance(leaf, Tensor):
            texts.append(f"{tuple(leaf.shape)} {leaf.dtype}")
            tensors.append(_some_bytes(leaf))
        else:
            # The repr of other objects may differ between processes.
            texts.append(repr(leaf) if isinstance(leaf, str | int | float | None) else type(leaf).__qualname__)
    total = zlib.crc32(repr(texts).encode())
    for tensor in _on_host(tensors):
        total = zlib.crc32(tensor.numpy().tobytes(), total)
    return total


def _some_bytes(tensor: Tensor) -> Tensor:
    flat = tensor.detach().reshape(-1)
    # Odd, so that the sample covers all columns of a tensor whose row length is a power of two.
    step = -(-flat.numel() // _MAX_COMPARED) | 1
    # As bytes, because numpy has no bfloat16.
    return flat[::step].contiguous().view(torch.uint8)


def _on_host(tensors: list[Tensor]) -> list[Tensor]:
    """One-dimensional tensors, copied to host memory; the host waits once per device, not once per tensor."""
    moved = list(tensors)
    for device in {tensor.device for tensor in tensors if not tensor.is_cpu}:
        places = [place for place, tensor in enumerate(tensors) if tensor.device == device]
        joined = torch.cat([tensors[place] for place in places]).cpu()
        for place, part in zip(places, torch.split(joined, [len(tensors[place]) for place in places]), strict=True):
            moved[place] = part
    return moved
