"""What each rank reports of its batch, and what is wrong where the batches of the ranks do not go together.

A step whose batches do calls nothing here.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn, Protocol

from hybridpp.cluster import Group, gather_objects, name_ranks
from hybridpp.errors import DataError, RefusedByPeerError
from hybridpp.pipeline.batch import SplitBatch

READY, EXHAUSTED, FAILED = 0.0, 1.0, 2.0
"""Values of :attr:`RankBatchInfo.status`."""


@dataclass(frozen=True)
class RankBatchInfo:
    """The batch of one rank before a step.

    Attributes:
        status: ready, out of data, or failed.
        num_items: number of items that the batch's loss is a mean over.
        num_microbatches: number of micro-batches.
        digest: of the batch, equal on ranks that hold the same batch; 0 if digests are not compared.
        deferred: 1 if the digest leaves out the values of tensors on a device, which are compared with the losses.
        stop: number of the signal that told this rank to stop; 0: none.
        form: a number for what the loss is a mean over, where that was found and this rank computes losses; else 0.
        loader: digest of what the data is made of, see :class:`~hybridpp.pipeline.ReadAheadIterator`; 0: not known.
        counts: of what the batch's loss is divided by, in that case.
    """

    status: float
    num_items: float = 0.0
    num_microbatches: float = 0.0
    digest: float = 0.0
    deferred: float = 0.0
    stop: float = 0.0
    form: float = 0.0
    loader: float = 0.0
    counts: tuple[float, ...] = ()


class FirstBatchChecks(Protocol):
    """Looks at the first batch that a model is trained with.

    Attributes:
        compares: whether :meth:`compare` wants digests of all batches.
    """

    compares: bool

    def check(self, batch: SplitBatch, data_iter: Iterator[Any]) -> None:
        """Refuse a batch of this rank."""

    def compare(self, batch_infos: list[RankBatchInfo]) -> None:
        """Look at the batches of all ranks."""


def check_readiness(batch_infos: Sequence[RankBatchInfo]) -> None:
    """Refuse batches of which some rank has none.

    Raises:
        RefusedByPeerError: reading failed on another rank.
        DataError: some ranks are out of data and others are not, or no batch has an item.
    """
    failed = [rank for rank, info in enumerate(batch_infos) if info.status == FAILED]
    if failed:
        raise RefusedByPeerError(f"reading the batch failed on {name_ranks(failed)}. See the error printed there.")
    exhausted = [rank for rank, info in enumerate(batch_infos) if info.status == EXHAUSTED]
    if exhausted and len(exhausted) < len(batch_infos):
        raise DataError(
            f"the data ended on {name_ranks(exhausted)} but not on the others. Give every rank an iterator of the same "
            "length: use plugin.prepare_dataloader, and take len(dataloader) steps."
        )
    if not exhausted and sum(info.num_items for info in batch_infos) == 0:
        raise DataError(
            "the criterion counts no items in any replica's batch, so its mean is not defined. "
            "Check criterion.num_items and the labels."
        )


def refuse_unlike_loaders(control: Group, call: str, made_of: Mapping[str, str]) -> NoReturn:
    """Refuse dataloaders that ranks have not made or used alike. Collective: all ranks, one exchange.

    Args:
        control: all ranks.
        call: that this rank is in, see :mod:`hybridpp.cluster.gather_numbers`.
        made_of: see :class:`~hybridpp.pipeline.ReadAheadIterator`; empty: not known.

    Raises:
        DataError: always; on every rank, with what differs, its values and the ranks.
    """
    rows = gather_objects(control, call, dict(made_of))
    clauses = []
    for name in dict.fromkeys(name for row in rows for name in row):
        ranks_of: dict[str, list[int]] = {}
        for rank, row in enumerate(rows):
            if row:
                ranks_of.setdefault(row.get(name, "missing"), []).append(rank)
        if len(ranks_of) > 1:
            clauses.append(
                f"{name} is {', '.join(f'{value} on {name_ranks(those)}' for value, those in ranks_of.items())}"
            )
    raise DataError(
        f"the dataloaders of all ranks must be made and used alike: {'; '.join(clauses)}. Replicas would see samples "
        "of each other, and others never. Call plugin.prepare_dataloader with the same arguments on every rank (each "
        "replica gets its own samples), and iterate over it, or set its epoch, on all of them."
    )


def different_batches(ranks: Sequence[int]) -> DataError:
    """The error of ranks of one pipeline that hold different batches."""
    return DataError(
        f"the ranks of one pipeline must hold the same batch: {name_ranks(ranks)} hold different ones. "
        "Use plugin.prepare_dataloader, or seed the sampler and the transforms alike on all of them."
    )


def different_counts(ranks: Sequence[int], batch_infos: Sequence[RankBatchInfo]) -> DataError:
    """The error of ranks of one pipeline that split a batch differently."""
    counts = sorted({int(batch_infos[rank].num_microbatches) for rank in ranks})
    return DataError(
        f"the ranks of one pipeline must split a batch alike: {name_ranks(ranks)} split it into "
        f"{' and '.join(map(str, counts))} micro-batches. Pass the same num_microbatches to execute_pipeline on all of "
        "them."
    )
