"""Tensor, pipeline and data parallelism with mixed precision: the plugin most scripts use."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Unpack

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, Dataset

from hybridpp.cluster import RankGrid, check_joined, current_world, preserved_random_state, ranks_per_host
from hybridpp.config import ParallelConfig, PipelineGradientCheckpointConfig, Precision, require_bools
from hybridpp.errors import ConfigError
from hybridpp.estimate import EstimateInput, LayoutEstimator
from hybridpp.pipeline import (
    ForwardSignature,
    InputSelection,
    SignatureCache,
    StageManager,
    check_reduction,
    compile_keywords,
    num_samples,
    to_plain_containers,
    with_selection,
)
from hybridpp.plugin import Boosted, Plugin, PreviewsTensorParallel, TensorParallelPreview
from hybridpp_plugins.auto_layout import ChoosesLayout
from hybridpp_plugins.boosted_models import BoostedModels
from hybridpp_plugins.criterion_weights import CriterionWeights
from hybridpp_plugins.dataloader import DataLoaderConfig
from hybridpp_plugins.engine_handle import attach_engine
from hybridpp_plugins.layout import Layout
from hybridpp_plugins.layout_estimator import PluginLayoutEstimator, settings_parser
from hybridpp_plugins.lr_scheduler import SkipAwareScheduler
from hybridpp_plugins.model_info import check_parts
from hybridpp_plugins.place_model import BoostContext
from hybridpp_plugins.preview_tp import preview_tensor_parallel
from hybridpp_plugins.rollback import undone_on_failure
from hybridpp_plugins.sample import Samples, check_samples, find_samples
from hybridpp_plugins.schedule_planner import SchedulePlanner
from hybridpp_plugins.set_alike import ALIKE, ComparedFacts, check_alike, setting_facts
from hybridpp_plugins.settings import parse_settings
from hybridpp_plugins.setup import boost
from hybridpp_plugins.signature import line_by_line
from hybridpp_plugins.unsupported import OtherLibrarySettings
from hybridpp_plugins.weight_check import WeightCheck


class HybridParallelPlugin(BoostedModels, Plugin, PreviewsTensorParallel, ChoosesLayout):
    """Trains one model on ``tp_size * pp_size`` ranks per replica, with as many replicas as the world holds.

    The world has ``dp_size * pp_size * tp_size`` ranks; ``dp_size`` follows. With no arguments, every rank trains a
    replica of the complete model in fp32.

    Collective: every rank of the world must construct it, with the same settings.

    Args:
        tp_size: tensor-parallel ranks, which shard each layer; 1: layers are not sharded.
        pp_size: ranks of each pipeline; 1: no pipeline. The script stays the same.
        precision: number format of the forward and the backward pass; with fp16 and bf16, fp32 masters are kept. None:
            that of ``Booster(mixed_precision=...)``, else fp32.
        enable_all_optimization: let torch use its fastest fp32 matrix kernels (TF32 on CUDA); no effect on the CPU.
        compile_blocks: whether ``torch.compile`` compiles the model's blocks, equal blocks once; or a dict of its
            keywords. With ``tp_size > 1`` each is several graphs; sequence parallelism excludes it.

        num_microbatches: micro-batches per batch. With ``pp_size > 1``, give this or ``microbatch_size``; else 1.
        microbatch_size: samples per micro-batch.
        schedule: order of forward and backward passes: a name (``"1f1b"``, ``"gpipe"``, ``"eager-1f1b"``,
            ``"interleaved"``, ``"zb-h1"``, ``"zb-h2"``, ``"interleaved-zb"``, ``"zb-v"``), a CSV or JSON file, the
            actions of each rank, or a function ``(num_ranks, num_microbatches)`` that returns them; None: ``"1f1b"``.
        num_model_chunks: stages per rank; None: as many as the schedule has. Without a schedule, a number above 1 is
            for ``"interleaved"``.
        gradient_checkpoint_config: which blocks recompute their activations in the backward pass; None: no block.
        batch_dims: dimension that the samples of a batch lie along: a number for all tensors, or a dict or list of
            numbers, nested as the batch is; None: dimension 0.
        output_dims: the same for what the model returns; None: ``batch_dims`` where that is a number, else 0.

        layers_per_stage: number of blocks of each stage, in order; None: found by ``balance``.
        split_points: modules to cut ``"before"`` or ``"after"``, by name: ``{"encoder.layer.5": "after"}``.
        balance: what the stages share evenly where no cut is given: FLOPs of the forward pass, parameters, or the time
            that rank 0 measures at boost.
        memory_limit: upper limit of a rank's parameters, gradients and optimizer state (activations do not count):
            bytes, or text such as ``"16GiB"``; None: no limit.

        tensor_parallel_plan: styles by patterns of module names: ``{"*.q_proj": "column", "*.o_proj": "row"}``; None:
            found by running the model's blocks.
        enable_sequence_parallelism: whether each tensor-parallel rank computes on its shard of the sequence between the
            sharded layers of a block; needs ``tp_size > 1``.
        sequence_parallelism_mode: ``"split_gather"``, the only supported mode; None means the same.
        zero_stage: what replicas divide among themselves (ZeRO). 0: nothing; 1: optimizer state and fp32 masters, with
            the same results; 2: also gradients; 3: also weights.
        zero_size: how many neighbouring replicas divide that among themselves, of which other replicas have copies
            (hybrid sharding); it divides ``dp_size``. ``"host"``: those of one host; None: all replicas.
        zero_reduce: when gradients are summed over the replicas from stage 2 on: after the backward pass of each
            ``"microbatch"`` (the default; results differ by rounding), or once per ``"step"`` (the same results).
        offload_optimizer: share of the optimizer's state and of fp32 masters that lies in host memory and is updated
            there, 0 to 1, with every ``zero_stage``.
        max_gathered_stages: at stage 3 with several stages per rank, of how many the weights are gathered at a time.
        broadcast_buffers: whether replicas take the first one's persistent buffers after each step of training, where a
            forward writes to them, as in ``DistributedDataParallel``; False: each keeps its own. Running statistics of
            batch normalisation are those of one process either way.
        check_weights_every: number of training steps after which copies of weights on several ranks are compared, bit
            by bit, and a difference is an error on all ranks; 0: never.

        fp32_modules: patterns of names or classes of modules that compute in fp32: ``["*.router"]``; after ``!``,
            modules that do not.
        fp32_norms: whether norms compute in fp32; None: all but torch's LayerNorm and RMSNorm on CUDA, whose kernels
            take half precision and compute in fp32.
        fp32_losses: whether torch's loss functions compute in fp32 inside the model's forward.

        max_norm: gradient norm (L2, over all parameters) to clip to; 0: no clipping.
        error_if_nonfinite: an inf or NaN gradient norm in fp32 and bf16 raises (True) or skips the step (False); None:
            raises where ``max_norm`` is set, else the norm is not computed. fp16 always skips the step.
        fused_optimizer: where an Adam or AdamW that leaves the choice to torch uses fused kernels: on CUDA (None), also
            on CPU (True), or nowhere (False). Fused optimizers clip and unscale in their kernels, unless this is False.
        fused_weight_gradients: whether the kernel that computes gradients of linear layers' half-precision weights adds
            them to the fp32 sums, where the device has such a kernel (CUDA).
        ddp_bucket_cap_mb: size of the buffers that gradients are all-reduced in, in MB (2**20 bytes).
        communication_dtype: format of gradients in those all-reduces; None: fp32, in which they are accumulated.

        initial_scale: fp16 loss scale of the first step.
        growth_factor: factor on the scale after ``growth_interval`` steps in a row without overflow.
        backoff_factor: factor on the scale at an overflow.
        growth_interval: steps without overflow before the scale grows.
        hysteresis: the scale backs off at the overflow of this number, and at every later one until it grows.
        min_scale: lower limit of the scale.
        max_scale: upper limit of the scale.

        other: keywords of other libraries: ``pp_style`` is ``schedule``, ``num_layers_per_stage`` is
            ``layers_per_stage``, ``cpu_offload`` is ``offload_optimizer=1.0``; others are accepted where they have no
            effect, see
            :class:`~hybridpp_plugins.unsupported.OtherLibrarySettings`. Any other name is refused.

    Attributes:
        tp_size, pp_size, dp_size: ranks on each axis.
        tp_group, pp_group, dp_group: this rank's ``torch.distributed`` groups; None if no job was launched.
        sp_size: ranks for sequence parallelism only: 1.
        sp_group: ``tp_group`` with sequence parallelism; else None.
        stage_manager: this rank's stages in its pipeline.
        precision, max_norm, zero_stage: as given.

    Raises:
        ConfigError: a setting is wrong or not supported, or the world size does not fit.

    Example:
        >>> plugin = HybridParallelPlugin(pp_size=1, num_microbatches=4, max_norm=1.0)
        >>> plugin.precision, plugin.dp_size, plugin.stage_manager.is_last_stage()
        ('fp32', 1, True)
    """

    @line_by_line
    def __init__(
        self,
        tp_size: int = 1,
        pp_size: int = 1,
        *,
        precision: Precision | Literal["fp32", "fp16", "bf16"] | None = "fp32",
        enable_all_optimization: bool = False,
        compile_blocks: bool | Mapping[str, Any] = False,
        num_microbatches: int | None = None,
        microbatch_size: int | None = None,
        schedule: str | Path | Sequence[Sequence[Any]] | Callable[[int, int], Any] | None = None,
        num_model_chunks: int | None = None,
        gradient_checkpoint_config: PipelineGradientCheckpointConfig | Mapping[str, Any] | None = None,
        batch_dims: int | Mapping[str, Any] | Sequence[Any] | None = None,
        output_dims: int | Mapping[str, Any] | Sequence[Any] | None = None,
        layers_per_stage: Sequence[int] | None = None,
        split_points: Mapping[str, Any] | None = None,
        balance: Literal["flops", "parameters", "time"] = "flops",
        memory_limit: int | str | None = None,
        tensor_parallel_plan: Mapping[str, str] | None = None,
        enable_sequence_parallelism: bool = False,
        sequence_parallelism_mode: Literal["split_gather"] | None = None,
        zero_stage: int = 0,
        zero_size: int | Literal["host"] | None = None,
        zero_reduce: Literal["microbatch", "step"] | None = None,
        offload_optimizer: float = 0.0,
        max_gathered_stages: int | None = None,
        broadcast_buffers: bool = True,
        check_weights_every: int = 0,
        fp32_modules: Sequence[str] = (),
        fp32_norms: bool | None = None,
        fp32_losses: bool = True,
        max_norm: float = 0.0,
        error_if_nonfinite: bool | None = None,
        fused_optimizer: bool | None = None,
        fused_weight_gradients: bool = True,
        ddp_bucket_cap_mb: float = 25.0,
        communication_dtype: Literal["fp32", "fp16", "bf16"] | torch.dtype | None = None,
        initial_scale: float = 2.0**12,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 1000,
        hysteresis: int = 1,
        min_scale: float = 1.0,
        max_scale: float = 2.0**32,
        **other: Unpack[OtherLibrarySettings],
    ):
        given = {name: value for name, value in locals().items() if name not in ("self", "other")}
        BoostedModels.__init__(self)  # super() would add a name to locals()
        self._given = (given, other)
        self.settings = parse_settings(given, other)
        check_joined()
        world = current_world()
        if zero_size == "host":
            zero = self.settings.zero.within_host(ranks_per_host(world), tp_size * pp_size)
            self.settings = self.settings._replace(zero=zero)
        self.tp_size, self.pp_size, self.sp_size = tp_size, pp_size, 1
        self.dp_size = self.settings.parallel.dp_size(world.size)
        self.precision = str(self.settings.precision)
        self.max_norm = self.settings.optimizer.max_norm
        self.zero_stage = self.settings.zero.zero_stage
        self._planner = SchedulePlanner(self.settings.pipeline, pp_size, self.settings.zero.among(self.dp_size))
        if self.settings.compile.is_on and self._planner.splits_backward:
            compile_keywords(self.settings.compile.keywords())
        grid = RankGrid(dp_size=self.dp_size, pp_size=pp_size, tp_size=tp_size)
        with world.progress.inside("setup", lambda: f"making {type(self).__name__}"):
            with world.meeting():
                check_alike(world.control(), f"making {type(self).__name__}", [self._compared_settings()])
            self.layout = Layout.create(world, grid)
        self.stage_manager: StageManager = self.layout.stage_manager(self._planner.placement)
        self._num_boosted = 0
        if enable_all_optimization:
            torch.set_float32_matmul_precision("high")

    def _compared_settings(self) -> ComparedFacts:
        return ComparedFacts(setting_facts(self._given[0], self.settings), f"Give {type(self).__name__} {ALIKE}")

    def control_precision(self) -> bool:
        return self._given[0]["precision"] is not None

    def supported_precisions(self) -> list[str]:
        return [str(precision) for precision in Precision]

    def set_precision(self, precision: str) -> None:
        if self.control_precision():
            super().set_precision(precision)
        given, other = self._given
        settings = parse_settings({**given, "precision": precision}, other)
        if self._num_boosted and settings.precision != self.settings.precision:
            raise ConfigError(
                f"this plugin has boosted a model in {self.precision}: got mixed_precision={precision!r}. Make another "
                f"{type(self).__name__} for it."
            )
        self.settings = settings._replace(zero=self.settings.zero)
        self.precision = str(self.settings.precision)

    @property
    def tp_group(self) -> dist.ProcessGroup | None:
        """This rank's tensor-parallel ranks."""
        return self.layout.tp.process_group

    @property
    def pp_group(self) -> dist.ProcessGroup | None:
        """The ranks of this rank's pipeline, by stage."""
        return self.layout.pp.process_group

    @property
    def dp_group(self) -> dist.ProcessGroup | None:
        """The ranks that hold this rank's stage in every replica."""
        return self.layout.dp.process_group

    @property
    def sp_group(self) -> dist.ProcessGroup | None:
        """The ranks that hold shards of this rank's sequences, with sequence parallelism; else None."""
        return self.tp_group if self.settings.parallel.enable_sequence_parallelism else None

    @property
    def holds_results(self) -> bool:
        """Whether this rank is the first of those of its replica's last stage."""
        return self.stage_manager.is_last_stage() and self.layout.tp.rank == 0

    def count_samples(self, batch: Any) -> int:
        """The number of samples of a batch, along ``batch_dims``."""
        return num_samples(to_plain_containers(batch), self.settings.pipeline.batch_dims or 0)

    @line_by_line
    def prepare_dataloader(
        self,
        dataset: Dataset[Any],
        batch_size: int | None = None,
        shuffle: bool = False,
        seed: int = 1024,
        drop_last: bool = False,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        num_workers: int = 0,
        pin_memory: bool | None = None,
        seed_samples: bool | None = None,
        distributed_sampler_cls: None = None,
        **options: Any,
    ) -> DataLoader[Any]:
        """A dataloader whose replicas see disjoint samples, and whose ranks of one replica see the same batches.

        An epoch covers the dataset once; each pass over the loader shuffles again. The batches of R replicas with batch
        size B are, together, those of one replica with batch size R * B.

        Args:
            dataset: a map-style dataset; or an ``IterableDataset`` that yields all its samples on every rank, in the
                same order: each replica takes its part of them (no ``shuffle``, at most one worker).
            batch_size: samples per replica and step.
            shuffle: whether to draw a new order for each epoch.
            seed: of that order, and of random numbers.
            drop_last: whether to skip an incomplete last global batch.
            collate_fn: makes a batch from samples; None stacks them, and lists of numbers in them to rows of a tensor.
            num_workers: processes that load data.
            pin_memory: whether to put batches in page-locked memory, from which a device copies without the host; None:
                if this rank computes on a CUDA device.
            seed_samples: whether Python's, numpy's and torch's generators are seeded for each sample with the seed, the
                epoch and its index, so that random augmentation is the same for any number of workers and replicas.
                The dataset is then wrapped, and samples are loaded one at a time. None: where samples have indices.
            distributed_sampler_cls: accepted for compatibility, as None only.
            options: further arguments of ``torch.utils.data.DataLoader``.

        Raises:
            ConfigError: ``batch_size`` is left out or below 1, a bool setting is no bool, a sampler is given, or an
                option does not fit the dataset.
            DataError: the dataset has no length, is empty, or is too small for one step.
        """
        if pin_memory is None:
            pin_memory = self.layout.world.device.type == "cuda"
        require_bools(pin_memory=pin_memory)
        if distributed_sampler_cls is not None:
            raise ConfigError(
                "prepare_dataloader selects each replica's samples itself: got distributed_sampler_cls="
                f"{distributed_sampler_cls!r}. Leave it out, or make a DataLoader with a sampler for num_replicas="
                f"{self.dp_size} and rank={self.layout.here.dp}, and pass it to booster.boost."
            )
        config = DataLoaderConfig(
            batch_size=batch_size,
            num_replicas=self.dp_size,
            replica=self.layout.here.dp,
            shuffle=shuffle,
            seed=seed,
            drop_last=drop_last,
            seed_samples=seed_samples,
            collate_fn=collate_fn,
            num_workers=num_workers,
            options={"pin_memory": pin_memory, **options},
        )
        return config.loader(dataset)

    def configure(
        self,
        parts: Boosted,
        *,
        device: torch.device | None = None,
        sample: Any = None,
        samples: Sequence[Any] | None = None,
        model_inputs: InputSelection | None = None,
        loss_reduction: Literal["mean", "sum"] | None = None,
    ) -> Boosted:
        """See :meth:`hybridpp.Booster.boost`."""
        self._check_open()
        check_parts(parts)
        check_samples(sample, samples)
        device = device or self.layout.world.device
        if device.type == "cuda" and device.index is None:
            device = torch.device("cuda", torch.cuda.current_device())
        self.layout.check_carried(device)
        signature = ForwardSignature.of(parts.model.forward, type(parts.model).__name__)
        called = with_selection(signature, model_inputs)
        if loss_reduction is not None:
            check_reduction(parts.criterion, loss_reduction)

        def shown() -> Samples:
            found = find_samples(parts.model, parts.dataloader, sample, device, samples)
            return found.called_by(called, parts.criterion)

        criteria = CriterionWeights(
            parts.model, self.layout, self.settings.precision, shards_weights=self.zero_stage == 3
        )
        if parts.optimizer is not None:
            criteria.check(parts.criterion)
        name = type(parts.model).__name__
        boosting = self.layout.world.progress.inside("setup", lambda: f"booster.boost of {name}")
        with self._noting("booster.boost"), boosting, undone_on_failure(parts.model, parts.optimizer) as rollback:
            context = BoostContext(self.settings, self.layout, self._planner, device, shown, rollback)
            with preserved_random_state(device):
                engine = boost(parts, context, self._num_boosted, self._compared_settings())
            engine.criteria = criteria
            engine.signatures = SignatureCache(parts.model, signature, model_inputs, loss_reduction)
            attach_engine(engine.adapter, engine)
            engine.share(self._saves.status, self._interruption)
            every = self.settings.parallel.check_weights_every
            if every and engine.optimizer is not None and self.layout.world.size > 1:
                check = WeightCheck(every, engine.model, engine.weights, engine.optimizer, self.layout)
                engine.epilogue.weight_check = check
            scheduler: Any = parts.lr_scheduler
            if scheduler is not None and engine.optimizer is not None:
                scheduler = SkipAwareScheduler(scheduler, engine.optimizer)
        self._num_boosted += 1
        if engine.optimizer is not None:
            self._join(engine.optimizer)
        engine.watch_parts()
        return parts._replace(optimizer=engine.optimizer, lr_scheduler=scheduler)

    @classmethod
    def preview_tensor_parallel(
        cls, model: nn.Module, config: ParallelConfig, precision: Precision = Precision.FP32
    ) -> TensorParallelPreview:
        """How :meth:`configure` would shard the layers, without a plan and a sample of the user."""
        return preview_tensor_parallel(model, config, precision)

    @classmethod
    def layout_estimator(cls, model: nn.Module, given: EstimateInput) -> LayoutEstimator:
        """What estimates layouts of a model, without running any: see :class:`~hybridpp.estimate.LayoutEstimator`."""
        return PluginLayoutEstimator(model, given, settings_parser(HybridParallelPlugin.__init__))
