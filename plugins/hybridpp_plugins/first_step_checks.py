"""Checks during the first training step, for mistakes that are not errors."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from hybridpp.cluster import get_dist_logger
from hybridpp.config import PipelineConfig
from hybridpp.data_parallel import BufferWriteDetector
from hybridpp.errors import DataError
from hybridpp.nn import walk
from hybridpp.nn.pretrained_model import attends_over_packed
from hybridpp.nn.torch_private import index_sampler_of
from hybridpp.pipeline import RankBatchInfo, SplitBatch, check_batch_dims, watch_sequence_axes
from hybridpp.pipeline.packed_rows import is_packed
from hybridpp_plugins.layout import Layout


class FirstStepChecks:
    """Checks a model's first training step.

    Args:
        model: that is trained.
        layout: the ranks.
        pipeline: how batches are split.
        keeps_buffers: whether each replica keeps the buffers that its forward passes write to.

    Attributes:
        compares: whether the batches of replicas must be compared.
    """

    def __init__(self, model: nn.Module, layout: Layout, pipeline: PipelineConfig, keeps_buffers: bool):
        self.compares = layout.dp.size > 1
        self._model, self._layout = model, layout
        self._warns_of_buffers = keeps_buffers and layout.dp.size > 1
        self._dims_are_said = pipeline.batch_dims is not None

    def check(self, batch: SplitBatch, data_iter: Iterator[Any]) -> None:
        """Refuse a packed row that is cut and attended over; without ``batch_dims``, one of samples in dimension 1.

        Raises:
            DataError: the sequences of a packed row attend to each other, or samples are probably in another dimension.
        """
        if len(batch.microbatches) > 1 and is_packed(batch.full_batch):
            self._check_packed(batch.full_batch)
        if not self._dims_are_said:
            # Known for torch's own iterators only.
            size = getattr(index_sampler_of(data_iter), "batch_size", None)
            check_batch_dims(batch, size if isinstance(size, int) else None)

    def _check_packed(self, batch: Any) -> None:
        if batch.get("use_cache") is False:
            return
        for module in walk.modules(self._model):
            if attends_over_packed(module):
                raise DataError(
                    "micro-batches are cut between the sequences of a packed row, and the tokens of the whole row "
                    f"attend over all of them: {type(module).__name__} makes a cache of keys and values "
                    "(config.use_cache=True), for which transformers ignores where the sequences begin. Set "
                    "model.config.use_cache = False, as training has no use for it; or use num_microbatches=1."
                )

    def compare(self, batch_infos: list[RankBatchInfo]) -> None:
        """Warn if replicas train on the same batch."""
        self.compares = False
        replicas: dict[float, list[int]] = {}
        for replica, ranks in enumerate(self._layout.pipelines):
            replicas.setdefault(batch_infos[ranks[0]].digest, []).append(replica)
        same = next((found for found in replicas.values() if len(found) > 1), None)
        if same:
            number = len(self._layout.pipelines)
            get_dist_logger().warning(
                f"replicas {', '.join(map(str, same))} of {number} train on the same batch, so all but one of them are "
                "redundant. Use plugin.prepare_dataloader, or a DistributedSampler with num_replicas=plugin.dp_size "
                f"and rank=torch.distributed.get_rank(plugin.dp_group), which is from 0 to {number - 1}.",
                ranks=[0],
            )

    @contextmanager
    def watched(self, model: nn.Module, batch: SplitBatch, training: bool) -> Iterator[None]:
        """A context for the run of a step; the first rank of each stage warns afterwards."""
        here = self._layout.here
        if here.dp or here.tp:
            yield
            return
        others = BufferWriteDetector(model) if training and self._warns_of_buffers else None
        parts = batch.microbatches if not self._dims_are_said and len(batch.microbatches) > 1 else ()
        with watch_sequence_axes(model, {microbatch.num_samples for microbatch in parts}) as found:
            yield
        if found:
            get_dist_logger().warning(
                f"{found[0]} uses dimension 0, along which the batch was split, as its sequence dimension. If samples "
                "are in dimension 1, set HybridParallelPlugin(batch_dims=1), or a dimension for each tensor; "
                "batch_dims=0 disables this warning."
            )
        written = others.written(model) if others else []
        if written:
            get_dist_logger().warning(
                f"the forward writes to the buffers {', '.join(written[:3])}{', …' if written[3:] else ''}. Each of "
                "the "
                f"{self._layout.dp.size} replicas keeps its own values, and save_model writes those of the first "
                "replica. If they depend on the data, all-reduce them over plugin.dp_group in the script."
            )
