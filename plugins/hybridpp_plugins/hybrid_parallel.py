"""Pipeline and data parallelism with mixed precision: the plugin most scripts use."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader, Dataset

from hybridpp.cluster import RankGrid, current_world, preserved_random_state
from hybridpp.config import ParallelConfig, require_switches
from hybridpp.data_parallel import ShardedBatchSampler
from hybridpp.errors import ConfigError
from hybridpp.pipeline import StageManager
from hybridpp.plugin import (
    Boosted,
    Criterion,
    DividesLayers,
    LayerDivision,
    Plugin,
    RecordsTimelines,
    RunsPipeline,
    SavesModels,
)
from hybridpp.precision import describe
from hybridpp_plugins.boosting import boost
from hybridpp_plugins.engine import Engine
from hybridpp_plugins.layout import Layout
from hybridpp_plugins.lr_scheduler import SkipAwareScheduler
from hybridpp_plugins.optimizer import HybridOptimizer
from hybridpp_plugins.planning import Planner
from hybridpp_plugins.preview import preview_division
from hybridpp_plugins.recording import Recording
from hybridpp_plugins.sample import find_samples
from hybridpp_plugins.settings import sort_settings
from hybridpp_plugins.weights import load_weights, save_weights

_ENGINE = "_hybridpp_engine"


class HybridParallelPlugin(Plugin, RunsPipeline, RecordsTimelines, DividesLayers, SavesModels):
    """Trains one model on ``tp_size * pp_size`` ranks per replica, with as many replicas as the world holds.

    Collective: every rank of the world must construct it, with the same settings.

    Args:
        tp_size: ranks that share each layer; 1 leaves layers whole.
        pp_size: pipeline stages; 1 is a model in one piece, and runs the same way.
        precision: ``"fp16"``, ``"bf16"`` or ``"fp32"``.
        enable_all_optimization: let torch choose its fastest fp32 matrix kernels (TF32 on CUDA); no effect on the CPU.
        options: any field of :class:`~hybridpp.config.PipelineConfig` (``num_microbatches`` or ``microbatch_size``:
            exactly one; ``schedule``, also spelled ``pp_style``; ``num_model_chunks``;
            ``gradient_checkpoint_config``),
            :class:`~hybridpp.config.OptimizerConfig` (``max_norm``, ``ddp_bucket_cap_mb``),
            :class:`~hybridpp.config.PrecisionConfig` (``fp32_modules``, ``fp32_norms``, ``fp32_losses``),
            :class:`~hybridpp.config.LossScaleConfig` (``initial_scale``, ``growth_interval``, …),
            :class:`~hybridpp.config.ParallelConfig` (``tensor_parallel_plan``, ``zero_stage``) and
            :class:`~hybridpp.config.PartitionConfig` (``layers_per_stage``, ``split_points``, ``balance``). A name that
            is none of these is refused.

    Attributes:
        tp_size, pp_size, dp_size: ranks on each axis.
        tp_group, pp_group, dp_group: this rank's ``torch.distributed`` groups; None where no job was launched.
        stage_manager: this rank's place in its pipeline.
        precision, max_norm, zero_stage: as given.

    Raises:
        ConfigError: a setting is wrong or not built, or the world size does not fit.

    Example:
        >>> plugin = HybridParallelPlugin(tp_size=1, pp_size=1, num_microbatches=4, precision="fp32")
        >>> plugin.dp_size, plugin.stage_manager.is_last_stage()
        (1, True)
    """

    def __init__(
        self,
        tp_size: int,
        pp_size: int,
        precision: str = "fp16",
        enable_all_optimization: bool = False,
        **options: Any,
    ):
        options = {"tp_size": tp_size, "pp_size": pp_size, **options}
        self.settings = sort_settings(precision, enable_all_optimization, options)
        world = current_world()
        self.tp_size, self.pp_size = tp_size, pp_size
        self.dp_size = self.settings.parallel.dp_size(world.size)
        self.precision = str(self.settings.precision)
        self.max_norm = self.settings.optimizer.max_norm
        self.zero_stage = self.settings.parallel.zero_stage
        self._planner = Planner(self.settings.pipeline, pp_size)
        grid = RankGrid(dp_size=self.dp_size, pp_size=pp_size, tp_size=tp_size)
        self.layout = Layout.create(world, grid, self._planner.placement)
        self.stage_manager: StageManager = self.layout.stage_manager(self._planner.placement)
        self._num_boosted = 0
        if enable_all_optimization:
            torch.set_float32_matmul_precision("high")

    @property
    def tp_group(self) -> dist.ProcessGroup | None:
        """The ranks that share this rank's layers."""
        return self.layout.tp.process_group

    @property
    def pp_group(self) -> dist.ProcessGroup | None:
        """The ranks of this rank's pipeline, by stage."""
        return self.layout.pp.process_group

    @property
    def dp_group(self) -> dist.ProcessGroup | None:
        """The ranks that hold this rank's stage in every replica."""
        return self.layout.dp.process_group

    def prepare_dataloader(
        self,
        dataset: Dataset[Any],
        batch_size: int,
        shuffle: bool = False,
        seed: int = 1024,
        drop_last: bool = False,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        num_workers: int = 0,
        pin_memory: bool = False,
        **options: Any,
    ) -> DataLoader[Any]:
        """A dataloader whose replicas see disjoint samples, and whose ranks of one replica see the same batches.

        An epoch is the whole dataset, once; each pass over the loader shuffles anew. The batches of R replicas with
        batch size B are, together, those of one replica with batch size R * B.

        Args:
            dataset: with a length.
            batch_size: samples per replica and step.
            shuffle: whether to draw a new order for each epoch.
            seed: of that order, and of the workers.
            drop_last: leave an incomplete last global batch out.
            collate_fn: makes a batch from samples; None stacks them.
            num_workers: processes that load data.
            pin_memory: put batches in page-locked memory.
            options: further arguments of ``torch.utils.data.DataLoader``.

        Raises:
            ConfigError: ``batch_size`` is below 1, or a switch is neither True nor False.
            DataError: the dataset is empty, or too small for one step.
        """
        require_switches(shuffle=shuffle, drop_last=drop_last, pin_memory=pin_memory)
        sampler = ShardedBatchSampler(
            num_samples=len(dataset),  # type: ignore[arg-type]  # Dataset declares no length
            batch_size=batch_size,
            num_replicas=self.dp_size,
            replica=self.layout.here.dp,
            shuffle=shuffle,
            seed=seed,
            drop_last=drop_last,
        )
        # Workers are seeded from here: alike on all ranks of a replica, differently between replicas.
        generator = torch.Generator().manual_seed(seed + self.layout.here.dp)
        return DataLoader(
            dataset,
            batch_sampler=sampler,
            collate_fn=collate_fn,
            num_workers=num_workers,
            pin_memory=pin_memory,
            generator=generator,
            **options,
        )

    def configure(self, parts: Boosted, *, device: torch.device | None = None, sample: Any = None) -> Boosted:
        """See :meth:`hybridpp.Booster.boost`."""
        if not isinstance(parts.model, nn.Module):
            raise ConfigError(f"boost takes a torch.nn.Module: got {type(parts.model).__name__}.")
        if _ENGINE in vars(parts.model):
            raise ConfigError("this model is boosted already. Call booster.boost once.")
        device = device or self.layout.world.device
        if device.type == "cuda" and device.index is None:
            device = torch.device("cuda", torch.cuda.current_device())
        with preserved_random_state(device):
            engine = boost(
                parts,
                self.settings,
                self.layout,
                self._planner,
                device,
                lambda: find_samples(parts.model, parts.dataloader, sample, device),
                self._num_boosted,
            )
        self._num_boosted += 1
        # Kept on the model, so that both are freed together.
        vars(parts.model)[_ENGINE] = engine
        scheduler: Any = parts.lr_scheduler
        if scheduler is not None and engine.optimizer is not None:
            scheduler = SkipAwareScheduler(scheduler, engine.optimizer)
        return parts._replace(optimizer=engine.optimizer, lr_scheduler=scheduler)

    def _engine(self, model: nn.Module) -> Engine:
        engine = vars(model).get(_ENGINE) if isinstance(model, nn.Module) else None
        if not isinstance(engine, Engine) or engine.layout is not self.layout:
            raise ConfigError(
                f"this {type(model).__name__} was not boosted by this booster. Pass the model that booster.boost "
                "returned."
            )
        return engine

    def execute_pipeline(
        self,
        data_iter: Iterator[Any],
        model: nn.Module,
        criterion: Criterion | None,
        optimizer: Optimizer | None,
        *,
        return_loss: bool,
        return_outputs: bool,
    ) -> dict[str, Any]:
        """See :meth:`hybridpp.Booster.execute_pipeline`."""
        engine = self._engine(model)
        engine.check_call(criterion, optimizer, return_loss)
        return engine.step(data_iter, criterion, return_loss, return_outputs)

    def backward(self, loss: Tensor, optimizer: Optimizer) -> None:
        """See :meth:`hybridpp.Booster.backward`."""
        if not isinstance(optimizer, HybridOptimizer):
            raise ConfigError(f"backward takes the boosted optimizer: got {type(optimizer).__name__}.")
        if self.pp_size > 1:
            raise ConfigError(
                f"backward needs the whole model on one rank: got pp_size={self.pp_size}. "
                "Call booster.execute_pipeline, which runs backward too."
            )
        optimizer.backward(loss)

    def no_sync(self, model: nn.Module, optimizer: Optimizer | None = None) -> AbstractContextManager[None]:
        """See :meth:`hybridpp.Booster.no_sync`."""
        return self._engine(model).no_sync()

    def record_timeline(self, model: nn.Module) -> AbstractContextManager[Recording]:
        """See :meth:`hybridpp.Booster.record_timeline`."""
        return self._engine(model).recorded()

    @classmethod
    def preview_division(cls, model: nn.Module, config: ParallelConfig) -> LayerDivision:
        """How :meth:`configure` would divide the layers, without a plan and a sample of the user's."""
        return preview_division(model, config)

    def describe_precision(self, model: nn.Module) -> str:
        """A table of what computes in which format, of what this rank holds of a boosted model."""
        engine = self._engine(model)
        return describe(engine.model, engine.formats, self.settings.formats.fp32_losses)

    def save_model(self, model: nn.Module, path: Path, *, shard: bool, size_per_shard_mb: int) -> None:
        """See :meth:`hybridpp.Booster.save_model`."""
        save_weights(self._engine(model), path, f"{size_per_shard_mb}MB" if shard else "1000TB")

    def load_model(self, model: nn.Module, path: Path, *, strict: bool) -> None:
        """See :meth:`hybridpp.Booster.load_model`."""
        load_weights(self._engine(model), path, strict)
