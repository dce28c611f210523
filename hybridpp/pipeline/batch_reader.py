"""Reads a rank's batches, and checks with all ranks that they go together: where it can, during the step before."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple, NoReturn, TypeAlias
from zlib import crc32

from hybridpp.cluster import Group, Patience, PendingNumbers, Progress, StopRequest, start_gather_numbers
from hybridpp.config import PipelineConfig
from hybridpp.errors import DataError, DeadlockError, PeerError, UnlikeCallsError
from hybridpp.pipeline.batch import SplitBatch, Summary, split_batch, to_plain_containers
from hybridpp.pipeline.batch_checks import (
    EXHAUSTED,
    FAILED,
    READY,
    FirstBatchChecks,
    RankBatchInfo,
    check_readiness,
    different_batches,
    different_counts,
    refuse_unlike_loaders,
)
from hybridpp.pipeline.criterion import CriterionAdapter
from hybridpp.pipeline.forward_signature import ForwardSignature
from hybridpp.pipeline.loader_name import loader_name
from hybridpp.pipeline.loss_items import LossForm
from hybridpp.pipeline.read_ahead import PreparedItems, ReadAheadIterator

Called: TypeAlias = CriterionAdapter | ForwardSignature


class BatchUse(NamedTuple):
    """What a batch is read for.

    Attributes:
        called: how the model and the criterion are called.
        training: whether gradients are enabled.
        num_microbatches: of the batch; None: as the plugin is set.
        form_of: what the loss is known to be a mean over, by whether a batch has ``num_items_in_batch``.
    """

    called: Called
    training: bool
    num_microbatches: int | None = None
    form_of: Callable[[bool], LossForm | None] | None = None

    def key(self) -> Any:
        """What the preparation depends on; equal for criteria that a script defines again at every step."""
        if isinstance(self.called, CriterionAdapter):
            forms = [id(self.form_of(has_total)) for has_total in (False, True)] if self.form_of else None
            called: Any = self.called.identity, self.called.num_items, self.called.sums, forms
        else:
            called = self.called
        return called, self.training, self.num_microbatches

    @property
    def has_losses(self) -> bool:
        """Whether losses end the step, with which the ranks compare what was deferred."""
        return isinstance(self.called, CriterionAdapter)


def step_call(model_name: str, training: bool) -> str:
    """A step, where ranks compare the calls that they are in."""
    if training:
        return f"a training step of {model_name} (execute_pipeline, gradients enabled)"
    return f"an evaluation of {model_name} (execute_pipeline, gradients disabled)"


def read_batch(data_iter: Iterator[Any]) -> Any:
    """The next batch, in containers that torch's pytree supports.

    Raises:
        DataError: ``data_iter`` is no iterator, or yields no batch.
        StopIteration: the data has ended.
    """
    if not hasattr(data_iter, "__next__"):
        raise DataError(f"execute_pipeline takes an iterator: got {type(data_iter).__name__}. Pass iter(dataloader).")
    return to_plain_containers(next(data_iter))


class PendingBatch:
    """This rank's batch, and the exchange of all ranks' batch infos that was started with it.

    Args:
        batch: of this rank.
        failure: why there is none; None: there is one.
        exchange: of the infos.
        pipelines: groups of ranks that must hold the same batch.
        refuse_loaders: raises an error about dataloaders that are not alike; collective.
    """

    def __init__(
        self,
        batch: SplitBatch,
        failure: BaseException | None,
        exchange: PendingNumbers,
        pipelines: tuple[tuple[int, ...], ...],
        refuse_loaders: Callable[[], NoReturn],
    ):
        self._batch, self._failure, self._exchange, self._pipelines = batch, failure, exchange, pipelines
        self._refuse_loaders = refuse_loaders

    def wait(self) -> tuple[SplitBatch, list[RankBatchInfo]]:
        """This rank's batch, and every rank's info, by rank.

        Raises:
            StopIteration: every rank is out of data.
            UnlikeCallsError: other ranks are in another call; raised on all ranks.
            DataError: some ranks are out of data, ranks have made or used dataloaders in other ways, or the ranks of a
                pipeline hold different batches.
            PeerError: reading failed on other ranks; their own error says why.
            Exception: what reading raised, on the rank that raised it.
        """
        try:
            batch_infos = [_info_of(numbers) for numbers in self._exchange.wait()]
        except UnlikeCallsError as error:
            raise error from self._failure
        if self._failure is not None and not isinstance(self._failure, StopIteration):
            raise self._failure
        if any(info.status != READY for info in batch_infos) or not any(info.num_items for info in batch_infos):
            check_readiness(batch_infos)
        if self._failure is not None:
            raise self._failure
        if len({info.loader for info in batch_infos} - {0.0}) > 1:
            self._refuse_loaders()
        for is_deferred in (0.0, 1.0):
            digests = [info.digest if info.deferred == is_deferred else None for info in batch_infos]
            check_equal(digests, self._pipelines)
        for ranks in self._pipelines:
            if len({batch_infos[rank].num_microbatches for rank in ranks}) > 1:
                raise different_counts(ranks, batch_infos)
        return self._batch, batch_infos

    def drop(self) -> None:
        """Complete the exchange of a batch that will not be used.

        Raises:
            UnlikeCallsError: other ranks are in another call.
        """
        self._exchange.wait()

    def check_calls(self, patience: Patience) -> None:
        """See :meth:`~hybridpp.cluster.PendingNumbers.check_arrived`."""
        self._exchange.check_arrived(patience)


def start_batch_check(
    control: Group,
    pipelines: tuple[tuple[int, ...], ...],
    call: str,
    prepare: Callable[[], SplitBatch],
    compare: bool = False,
    defer: bool = False,
    stop: float = 0.0,
    loader: Callable[[], Mapping[str, str]] = dict,
) -> PendingBatch:
    """Read this rank's batch, and begin to check that all ranks can run a step with theirs.

    Collective: every rank of ``control``; one small all-gather of host memory, for which the result waits.

    Args:
        control: all ranks of the world.
        pipelines: groups of ranks that must hold the same batch; batches are compared if a group has several ranks.
        call: that this rank is in; it must be the same on all ranks.
        prepare: reads and splits this rank's batch. What it raises, the result raises.
        compare: whether to compute digests even if every group is a single rank.
        defer: whether to leave values on a device to :func:`check_equal`, so that the host does not wait for it here;
            the batch has them as ``unchecked``.
        stop: number of the signal that told this rank to stop; 0: none.
        loader: what the data is made of, once the batch is read; see :attr:`ReadAheadIterator.made_of`.
    """
    batch = SplitBatch()
    failure: BaseException | None = None
    made_of: Mapping[str, str] = {}
    try:
        batch = prepare()
        is_compared = compare or any(len(ranks) > 1 for ranks in pipelines)
        summary = Summary.of(batch.full_batch) if is_compared else None
        if summary is not None and defer:
            summary, unchecked = summary.without_devices()
            batch = replace(batch, unchecked=unchecked)
        made_of = loader()
        own_info = RankBatchInfo(
            status=READY,
            num_items=batch.num_items,
            num_microbatches=float(len(batch.microbatches)),
            digest=summary.digest() if summary is not None else 0.0,
            deferred=float(bool(batch.unchecked)),
            form=batch.form.kind if batch.form is not None else 0.0,
            loader=float(crc32(repr(made_of).encode())) if made_of else 0.0,
            counts=batch.counts,
        )
    except StopIteration as error:
        failure, own_info = error, RankBatchInfo(EXHAUSTED)
    except Exception as error:
        failure, own_info = error, RankBatchInfo(FAILED)
    own_info = replace(own_info, stop=stop)
    exchange = start_gather_numbers(control, call, _numbers_of(own_info))
    return PendingBatch(batch, failure, exchange, pipelines, partial(refuse_unlike_loaders, control, call, made_of))


def _numbers_of(info: RankBatchInfo) -> list[float]:
    return [
        *(info.status, info.num_items, info.num_microbatches, info.digest, info.deferred, info.stop, info.form),
        info.loader,
        *info.counts,
    ]


def _info_of(numbers: Sequence[float]) -> RankBatchInfo:
    status, num_items, num_microbatches, digest, deferred, stop, form, loader, *counts = numbers
    return RankBatchInfo(status, num_items, num_microbatches, digest, deferred, stop, form, loader, tuple(counts))


def check_equal(digests: Sequence[float | None], pipelines: tuple[tuple[int, ...], ...]) -> None:
    """Refuse batches that differ within a pipeline.

    Args:
        digests: of the ranks' batches; None: not compared.
        pipelines: groups of ranks that must hold the same batch.

    Raises:
        DataError: a group has two digests.
    """
    for ranks in pipelines:
        if len({digests[rank] for rank in ranks} - {None}) > 1:
            raise different_batches(ranks)


class BatchReader:
    """Reads the batches of one boosted model.

    Whether all ranks can run a step with their batches is found out in an exchange that all ranks take part in. For
    iterators of the plugin's dataloaders it runs during the step before, so that no rank waits for the others between
    two steps: ranks that are done begin the next step while others still work on this one.

    Args:
        control: all ranks of the world.
        pipelines: groups of ranks that must hold the same batch; batches are compared if a group has several ranks.
        config: how batches are split.
        model_name: of the model, in errors.
        stop: what the ranks tell each other of a request to stop.
        progress: of this rank; None: nobody is told when a batch is read.
    """

    def __init__(
        self,
        control: Group,
        pipelines: tuple[tuple[int, ...], ...],
        config: PipelineConfig,
        model_name: str = "it",
        stop: StopRequest | None = None,
        progress: Progress | None = None,
    ):
        self._progress = progress or Progress()
        self._control, self._pipelines, self._config = control, pipelines, config
        self._stop = stop or StopRequest()
        self._model_name = model_name
        self._ahead: PreparedItems[PendingBatch] = PreparedItems(f"the next step of {model_name}")

    def read(
        self,
        data_iter: Iterator[Any],
        use: BatchUse,
        check: Callable[[], None],
        checks: FirstBatchChecks | None,
    ) -> tuple[SplitBatch, list[RankBatchInfo], Exception | None]:
        """This rank's batch; the batch info of every rank; and what ``check`` raised, if the others do not know yet.

        Collective: all ranks.

        Args:
            data_iter: of batches.
            use: what for.
            check: refuses a model that cannot be trained.
            checks: of the first training step; None after it.

        Raises:
            Exception: see :meth:`PendingBatch.wait`.
        """
        pending = self._take(data_iter, use.key()) if isinstance(data_iter, ReadAheadIterator) else None
        if pending is not None:
            batch, infos = self._wait(pending)
            try:
                check()
            except Exception as error:
                return batch, infos, error
            return batch, infos, None

        def prepare() -> SplitBatch:
            check()
            with self._reading(data_iter):
                batch = read_batch(data_iter)
            batch = self._split(batch, use)
            if checks is not None:
                checks.check(batch, data_iter)
            return batch

        compares = use.training and checks is not None and checks.compares
        defer = checks is None and use.has_losses
        batch, infos = self._wait(self._start("at the start of", prepare, use.training, data_iter, compares, defer))
        if checks is not None and compares:
            checks.compare(infos)
        return batch, infos, None

    def _wait(self, pending: PendingBatch) -> tuple[SplitBatch, list[RankBatchInfo]]:
        batch, infos = pending.wait()
        self._stop.heard(info.stop for info in infos)
        return batch, infos

    def read_ahead(self, data_iter: Iterator[Any], use: BatchUse) -> None:
        """Read the next batch, and begin its exchange. Collective: all ranks, with iterators of one kind.

        Problems are raised when the batch is used.
        """
        if not isinstance(data_iter, ReadAheadIterator) or not self._ahead.may_prepare(data_iter):
            return

        def prepare() -> SplitBatch:
            with self._reading(data_iter):
                batch = data_iter.peek()
            return self._split(to_plain_containers(batch), use)

        pending = self._start("in", prepare, use.training, data_iter, defer=use.has_losses)
        self._ahead.put(data_iter, pending, use.key())

    def _reading(self, data_iter: Iterator[Any]) -> AbstractContextManager[None]:
        return self._progress.inside("data", lambda: f"reading a batch from {loader_name(data_iter)}")

    def _take(self, data_iter: ReadAheadIterator, use: Any) -> PendingBatch | None:
        """The batch that was read ahead, if it is the next one and was prepared for this use."""
        prepared = self._ahead.take(data_iter, use)
        if prepared is None:
            return None
        pending, is_usable = prepared
        if is_usable:
            return pending
        pending.drop()
        return None

    def check_calls(self, patience: Patience) -> None:
        """Raise if a batch that was read ahead shows that ranks are in different calls.

        Call it when another rank is gone: its error may be that, and this rank has not waited for the exchange yet.

        Args:
            patience: with messages that are not here yet.

        Raises:
            UnlikeCallsError: they are.
        """
        for pending in self._ahead.values():
            with suppress(PeerError, DeadlockError):
                pending.check_calls(patience)

    def _start(
        self,
        moment: str,
        prepare: Callable[[], SplitBatch],
        training: bool,
        data_iter: Iterator[Any],
        compare: bool = False,
        defer: bool = False,
    ) -> PendingBatch:
        call = f"{moment} {step_call(self._model_name, training)}"
        loader = (lambda: data_iter.made_of) if isinstance(data_iter, ReadAheadIterator) else dict
        return start_batch_check(
            self._control, self._pipelines, call, prepare, compare, defer, stop=float(self._stop.own), loader=loader
        )

    def _split(self, batch: Any, use: BatchUse) -> SplitBatch:
        loss_of = use.called if isinstance(use.called, CriterionAdapter) else None
        split = split_batch(
            batch,
            num_microbatches=use.num_microbatches or self._config.num_microbatches,
            microbatch_size=None if use.num_microbatches else self._config.microbatch_size,
            num_items=loss_of.num_items if loss_of else None,
            sums=loss_of is not None and loss_of.sums,
            dims=self._config.batch_dims or 0,
            form_of=use.form_of,
        )
        use.called.model_inputs(split.microbatches[0].inputs)
        return split
