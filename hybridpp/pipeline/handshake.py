"""Before a step, all ranks tell each other what they hold; whatever is wrong is found here, by every rank alike."""

import zlib
from collections.abc import Callable, Iterator
from dataclasses import astuple, dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from hybridpp.cluster import Group
from hybridpp.errors import ConfigError, DataError, PeerError
from hybridpp.pipeline.batch import SplitBatch, plain

_READY, _EXHAUSTED, _FAILED = 0.0, 1.0, 2.0
# A tensor of more elements is compared by this many of them, evenly spread: enough to tell two batches apart.
_MAX_COMPARED = 4096


@dataclass(frozen=True)
class Report:
    """What one rank holds before a step.

    Attributes:
        status: ready, out of data, or failed.
        num_items: what the loss of its batch is a mean over.
        num_microbatches: parts of its batch.
        digest: of its batch; equal on ranks that hold the same one. 0 where no two ranks must.
        training: 1 where gradients are wanted.
    """

    status: float
    num_items: float = 0.0
    num_microbatches: float = 0.0
    digest: float = 0.0
    training: float = 0.0


def read_batch(data_iter: Iterator[Any]) -> Any:
    """The next batch, as containers that torch can walk.

    Raises:
        DataError: ``data_iter`` is no iterator, or the batch is no batch.
        StopIteration: there is none left.
    """
    if not hasattr(data_iter, "__next__"):
        raise DataError(f"execute_pipeline takes an iterator: got {type(data_iter).__name__}. Pass iter(dataloader).")
    return plain(next(data_iter))


def agree(
    control: Group, pipelines: tuple[tuple[int, ...], ...], training: bool, prepare: Callable[[], SplitBatch]
) -> tuple[SplitBatch, list[Report]]:
    """Read this rank's batch and make sure that the job can run a step.

    Collective: every rank of ``control``; one small all-gather of host memory.

    Args:
        control: all ranks of the world.
        pipelines: the ranks that must hold the same batch, group by group; where each is one rank, none is looked at.
        training: whether this rank wants gradients.
        prepare: reads and splits this rank's batch.

    Returns:
        This rank's batch, and every rank's report, by rank.

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
        is_shared = any(len(ranks) > 1 for ranks in pipelines)
        digest = float(_digest(batch.whole)) if is_shared else 0.0
        mine = Report(_READY, batch.num_items, float(len(batch.microbatches)), digest, float(training))
    except StopIteration as error:
        failure, mine = error, Report(_EXHAUSTED)
    except Exception as error:
        failure, mine = error, Report(_FAILED)
    gathered = control.all_gather(torch.tensor(astuple(mine), dtype=torch.float64))
    reports = [Report(*row.tolist()) for row in gathered]
    if failure is not None and not isinstance(failure, StopIteration):
        raise failure
    _check(reports, pipelines)
    if failure is not None:
        raise failure
    if sum(report.num_items for report in reports) == 0:
        raise DataError(
            "the criterion counts no items in the batch of any replica, so its mean is not defined. "
            "Check criterion.num_items and the labels."
        )
    return batch, reports


def _check(reports: list[Report], pipelines: tuple[tuple[int, ...], ...]) -> None:
    failed = [rank for rank, report in enumerate(reports) if report.status == _FAILED]
    if failed:
        raise PeerError(f"reading the batch failed on {_ranks(failed)}. See the error printed there.")
    exhausted = [rank for rank, report in enumerate(reports) if report.status == _EXHAUSTED]
    if exhausted and len(exhausted) < len(reports):
        raise DataError(
            f"the data ended on {_ranks(exhausted)} but not on the others. Give every rank an iterator of the same "
            "length: use plugin.prepare_dataloader, and take len(dataloader) steps."
        )
    for ranks in pipelines:
        if len({reports[rank].digest for rank in ranks}) > 1:
            raise DataError(
                f"the ranks of one pipeline must hold the same batch: {_ranks(ranks)} hold different ones. "
                "Use plugin.prepare_dataloader, or seed the sampler and the transforms alike on all of them."
            )
    if len({report.training for report in reports}) > 1:
        wanting = [rank for rank, report in enumerate(reports) if report.training]
        raise ConfigError(
            f"all ranks must train, or none: gradients are enabled on {_ranks(wanting)} only. "
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
            # Other objects have no text of their own that all processes agree on.
            texts.append(repr(leaf) if isinstance(leaf, str | int | float | None) else type(leaf).__qualname__)
    total = zlib.crc32(repr(texts).encode())
    for tensor in _on_host(tensors):
        total = zlib.crc32(tensor.numpy().tobytes(), total)
    return total


def _some_bytes(tensor: Tensor) -> Tensor:
    flat = tensor.detach().reshape(-1)
    # Odd, so that it does not keep to some columns of a tensor whose rows are a power of two long.
    step = -(-flat.numel() // _MAX_COMPARED) | 1
    # numpy knows no bfloat16, so the numbers are read as bytes.
    return flat[::step].contiguous().view(torch.uint8)


def _on_host(tensors: list[Tensor]) -> list[Tensor]:
    """The tensors, of one dimension each, in host memory; the host waits for a device once, not for every tensor."""
    moved = list(tensors)
    for device in {tensor.device for tensor in tensors if not tensor.is_cpu}:
        places = [place for place, tensor in enumerate(tensors) if tensor.device == device]
        joined = torch.cat([tensors[place] for place in places]).cpu()
        for place, part in zip(places, torch.split(joined, [len(tensors[place]) for place in places]), strict=True):
            moved[place] = part
    return moved
