"""The settings, as frozen dataclasses that check themselves. No torch here: a bad setting is found before it loads."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from enum import StrEnum
from typing import Any

from hybridpp.errors import ConfigError


class Precision(StrEnum):
    """The number format that the model computes in; weights are kept in fp32 beside it."""

    FP32 = "fp32"
    FP16 = "fp16"
    BF16 = "bf16"

    @classmethod
    def parse(cls, name: str) -> "Precision":
        """The member called ``name``.

        Raises:
            ConfigError: there is none of that name.
        """
        try:
            return cls(name)
        except ValueError:
            raise ConfigError(f"precision is one of {', '.join(cls)}: got {name!r}.") from None


# torch's dtypes as text: there is no torch here.
_DTYPE_NAMES = {"torch.float32": "fp32", "torch.float16": "fp16", "torch.bfloat16": "bf16"}


def require_switches(**values: Any) -> None:
    """Refuse what is neither True nor False.

    Raises:
        ConfigError: text such as ``"no"`` would count as True, and 0 as False.
    """
    for name, value in values.items():
        if not isinstance(value, bool):
            raise ConfigError(f"{name} is True or False: got {name}={value!r}. Pass one of these, no word or number.")


class _Settings:
    """What all settings have in common: each field that is a switch is checked to be one."""

    def __post_init__(self) -> None:
        known: Any = self
        require_switches(**{each.name: getattr(self, each.name) for each in fields(known) if each.type is bool})


def _require_positive(owner: str, **values: float) -> None:
    for name, value in values.items():
        if value <= 0:
            raise ConfigError(f"{owner} needs {name} > 0: got {name}={value}.")


@dataclass(frozen=True, kw_only=True)
class ParallelConfig(_Settings):
    """How many ranks share one replica of the model.

    Attributes:
        tp_size: ranks that share each layer.
        pp_size: pipeline stages.
        zero_stage: 0 keeps the whole optimizer state on every replica.
        tensor_parallel_plan: how layers are divided over the ranks that share them, by patterns of module names:
            ``{"*.q_proj": "column", "*.o_proj": "row"}``; None: it is found out by running the model's blocks.
        enable_sequence_parallelism: whether those ranks also share what lies between the divided layers of a block
            (norms, dropout, residuals), each with a shard of the sequences.
        sequence_parallelism_mode: ``"split_gather"``, also where it is None.
    """

    tp_size: int
    pp_size: int
    zero_stage: int = 0
    tensor_parallel_plan: Mapping[str, str] | None = None
    enable_sequence_parallelism: bool = False
    sequence_parallelism_mode: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, value in (("tp_size", self.tp_size), ("pp_size", self.pp_size)):
            if not isinstance(value, int) or value < 1:
                raise ConfigError(f"{name} is a whole number of ranks, at least 1: got {name}={value!r}.")
        plan: Any = self.tensor_parallel_plan
        if plan is not None and not (isinstance(plan, Mapping) and all(isinstance(name, str) for name in plan)):
            raise ConfigError(
                "tensor_parallel_plan is a dict of patterns of module names and styles, like "
                f"{{'*.q_proj': 'column', '*.o_proj': 'row'}}: got {plan!r}."
            )
        if self.zero_stage != 0:
            raise ConfigError(
                f"sharded optimizer state is not built yet: got zero_stage={self.zero_stage}. Use zero_stage=0."
            )
        self._check_sequences()

    def _check_sequences(self) -> None:
        mode = self.sequence_parallelism_mode
        if mode not in (None, "split_gather"):
            built = "not built yet" if mode in ("ring", "all_to_all") else "unknown"
            raise ConfigError(f"sequence_parallelism_mode={mode!r} is {built}. Use 'split_gather'.")
        if not self.enable_sequence_parallelism and mode is not None:
            raise ConfigError(
                f"sequence_parallelism_mode={mode!r} asks for nothing without enable_sequence_parallelism=True. "
                "Give both, or neither."
            )
        if self.enable_sequence_parallelism and self.tp_size == 1:
            raise ConfigError(
                "sequence parallelism divides sequences over the ranks that share layers: got tp_size=1. "
                "Use tp_size=2 or more, or leave enable_sequence_parallelism out."
            )

    def dp_size(self, world_size: int) -> int:
        """Replicas of the model in a job of ``world_size`` ranks.

        Raises:
            ConfigError: ``world_size`` is not a multiple of ``tp_size * pp_size``.
        """
        ranks = self.tp_size * self.pp_size
        if world_size % ranks:
            fits = [n for n in (world_size // ranks * ranks, (world_size // ranks + 1) * ranks) if n]
            raise ConfigError(
                f"world size must be a multiple of tp_size * pp_size: got world_size={world_size}, "
                f"tp_size={self.tp_size}, pp_size={self.pp_size}. "
                f"Start {' or '.join(map(str, fits))} processes, or change the sizes."
            )
        return world_size // ranks


@dataclass(frozen=True, kw_only=True)
class PartitionConfig(_Settings):
    """Where the model is cut into stages.

    Attributes:
        layers_per_stage: how many blocks each stage gets, in order.
        split_points: modules before or after which to cut, by name: ``{"encoder.layer.5": "after"}``.
        balance: what is shared out evenly where neither says so: ``"flops"`` of the forward, ``"parameters"``, or the
            ``"time"`` that rank 0 measures at boost, for which the whole model must fit on its device.
    """

    layers_per_stage: Sequence[int] | None = None
    split_points: Mapping[str, str] | None = None
    balance: str = "flops"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.split_points is not None and not isinstance(self.split_points, Mapping):
            raise ConfigError(
                f"split_points is a dict of module names and 'before' or 'after': got {self.split_points!r}."
            )
        counts: Any = self.layers_per_stage
        if counts is not None and not (
            isinstance(counts, Sequence) and counts and all(isinstance(count, int) and count > 0 for count in counts)
        ):
            got = list(counts) if isinstance(counts, list | tuple) else counts
            raise ConfigError(f"layers_per_stage gives every stage a whole number, at least 1: got {got!r}.")
        if self.layers_per_stage is not None and self.split_points is not None:
            raise ConfigError(
                "give layers_per_stage or split_points, not both: "
                f"got {list(self.layers_per_stage)} and {dict(self.split_points)}."
            )
        for name, side in (self.split_points or {}).items():
            if side not in ("before", "after"):
                raise ConfigError(f"split_points says 'before' or 'after' a module: got {side!r} for {name!r}.")
        if self.balance not in ("flops", "parameters", "time"):
            raise ConfigError(f"balance is one of flops, parameters, time: got {self.balance!r}.")


@dataclass(frozen=True, kw_only=True)
class PipelineGradientCheckpointConfig(_Settings):
    """Which activations are not kept for the backward pass, but computed again there.

    Of a stage's blocks the first ones are recomputed. Results do not change, dropout included; only time and memory do.

    Attributes:
        gradient_checkpointing_ratio: share of each stage's blocks that are recomputed, rounded down; all where neither
            this nor ``num_ckpt_layers_per_stage`` is given.
        num_ckpt_layers_per_stage: how many blocks of each stage are recomputed, in the order of the stages.
        max_stored_microbatches: a rank keeps this many micro-batches' activations whole (of each stage of it, one
            counts as one), and recomputes only for those it holds beyond; None: it recomputes for all.

    Example:
        >>> PipelineGradientCheckpointConfig(gradient_checkpointing_ratio=0.5).num_recomputed(stage=0, num_blocks=7)
        3
    """

    gradient_checkpointing_ratio: float | None = None
    num_ckpt_layers_per_stage: Sequence[int] | None = None
    max_stored_microbatches: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        ratio, counts, stored = self._values()
        if ratio is not None and counts is not None:
            raise ConfigError(
                "give gradient_checkpointing_ratio or num_ckpt_layers_per_stage, not both: "
                f"got {ratio!r} and {list(counts)}."
            )
        if ratio is not None and not (isinstance(ratio, int | float) and 0 <= ratio <= 1):
            raise ConfigError(
                f"gradient_checkpointing_ratio is a share, from 0 to 1: got gradient_checkpointing_ratio={ratio!r}."
            )
        if counts is not None and not (isinstance(counts, list | tuple) and counts and all(map(_is_count, counts))):
            raise ConfigError(
                f"num_ckpt_layers_per_stage gives every stage a whole number, at least 0: got {counts!r}."
            )
        if stored is not None and not _is_count(stored):
            raise ConfigError(
                "max_stored_microbatches is a whole number, at least 0, or None: "
                f"got max_stored_microbatches={stored!r}."
            )

    def _values(self) -> tuple[Any, Any, Any]:
        # Whatever a script gave, also what the types exclude.
        return self.gradient_checkpointing_ratio, self.num_ckpt_layers_per_stage, self.max_stored_microbatches

    def num_recomputed(self, stage: int, num_blocks: int) -> int:
        """How many of a stage's ``num_blocks`` blocks are recomputed."""
        if self.num_ckpt_layers_per_stage is not None:
            return self.num_ckpt_layers_per_stage[stage]
        ratio = 1.0 if self.gradient_checkpointing_ratio is None else self.gradient_checkpointing_ratio
        # 0.29 * 100 is a little less than 29.
        return int(ratio * num_blocks + 1e-9)


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


@dataclass(frozen=True, kw_only=True)
class PipelineConfig(_Settings):
    """How a batch is split, in which order its micro-batches run, and what is kept of them.

    Attributes:
        num_microbatches: micro-batches per batch; a batch of fewer samples gives one per sample.
        microbatch_size: samples per micro-batch, instead of ``num_microbatches``.
        schedule: the order of the work: a name (``"1f1b"``, ``"zb-h1"``, …), a file, programs, or a function
            ``(num_ranks, num_microbatches)`` that makes programs.
        num_model_chunks: stages per rank; None: what the schedule has.
        gradient_checkpoint_config: which activations are recomputed in the backward pass; also a dict of its fields;
            None: none are.
    """

    num_microbatches: int | None = None
    microbatch_size: int | None = None
    schedule: Any = "1f1b"
    num_model_chunks: int | None = None
    gradient_checkpoint_config: PipelineGradientCheckpointConfig | Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if (self.num_microbatches is None) == (self.microbatch_size is None):
            raise ConfigError(
                "give exactly one of num_microbatches and microbatch_size: "
                f"got num_microbatches={self.num_microbatches}, microbatch_size={self.microbatch_size}."
            )
        for name in ("num_microbatches", "microbatch_size"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, int) or value < 1):
                raise ConfigError(f"{name} is a whole number, at least 1: got {name}={value!r}.")
        chunks = self.num_model_chunks
        if chunks is not None and (not isinstance(chunks, int) or chunks < 1):
            raise ConfigError(f"num_model_chunks is a whole number, at least 1: got num_model_chunks={chunks!r}.")
        _ = self.recomputation

    @property
    def recomputation(self) -> PipelineGradientCheckpointConfig | None:
        """``gradient_checkpoint_config``, whichever way it was given."""
        given: Any = self.gradient_checkpoint_config
        if given is None or isinstance(given, PipelineGradientCheckpointConfig):
            return given
        known = [known.name for known in fields(PipelineGradientCheckpointConfig)]
        if not isinstance(given, Mapping) or not set(given) <= set(known):
            raise ConfigError(
                f"gradient_checkpoint_config is a PipelineGradientCheckpointConfig, or a dict of {', '.join(known)}: "
                f"got {given!r}."
            )
        return PipelineGradientCheckpointConfig(**given)


@dataclass(frozen=True, kw_only=True)
class PrecisionConfig(_Settings):
    """What computes in fp32 although the precision is fp16 or bf16.

    Attributes:
        fp32_modules: patterns of modules' names or classes, in which ``*`` stands for anything: ``["*.router"]``.
            Behind ``!``, modules that are in half precision after all: ``["*.mlp", "!*.mlp.fc2"]``, or
            ``["!LayerNorm"]`` against a rule. The last one that matches counts.
        fp32_norms: whether norms hold fp32 weights and compute in fp32; else in half precision, but for batch
            normalisation.
        fp32_losses: whether torch's loss functions compute in fp32 where the model's own forward calls them; else in
            the format of what it hands to them.
    """

    fp32_modules: Sequence[str] = ()
    fp32_norms: bool = True
    fp32_losses: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        given: Any = self.fp32_modules
        if isinstance(given, str) or not (
            isinstance(given, Sequence) and all(isinstance(pattern, str) and pattern.strip("!") for pattern in given)
        ):
            raise ConfigError(
                f"fp32_modules is a list of patterns of module names or classes, like ['*.router']: got {given!r}."
            )


@dataclass(frozen=True, kw_only=True)
class LossScaleConfig(_Settings):
    """How the fp16 loss scale starts and moves; unused in fp32 and bf16.

    Attributes:
        initial_scale: factor on the loss at the first step.
        growth_factor: the scale is multiplied by this after ``growth_interval`` clean steps.
        backoff_factor: and by this at an overflow.
        growth_interval: clean steps in a row before the scale grows.
        hysteresis: the scale backs off at this many overflows in a row; every one of them is skipped.
        min_scale: the scale never falls below this.
        max_scale: nor rises above this.
    """

    initial_scale: float = 2.0**12
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 1000
    hysteresis: int = 1
    min_scale: float = 1.0
    max_scale: float = 2.0**32

    def __post_init__(self) -> None:
        super().__post_init__()
        _require_positive(
            "loss scaling",
            initial_scale=self.initial_scale,
            min_scale=self.min_scale,
            growth_interval=self.growth_interval,
            hysteresis=self.hysteresis,
        )
        if self.growth_factor <= 1 or not 0 < self.backoff_factor < 1:
            raise ConfigError(
                "loss scaling needs growth_factor > 1 and 0 < backoff_factor < 1: "
                f"got growth_factor={self.growth_factor}, backoff_factor={self.backoff_factor}."
            )
        if not self.min_scale <= self.initial_scale <= self.max_scale:
            raise ConfigError(
                "loss scaling needs min_scale <= initial_scale <= max_scale: "
                f"got {self.min_scale}, {self.initial_scale}, {self.max_scale}."
            )


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig(_Settings):
    """What happens to gradients between the backward pass and the weights.

    Attributes:
        max_norm: global gradient norm above which all gradients are scaled down; 0 leaves them alone.
        ddp_bucket_cap_mb: size of the flat buffers that gradients are reduced in, in MB (2**20 bytes).
        communication_dtype: what gradients are rounded to on their way between replicas: ``"fp32"``, ``"fp16"``,
            ``"bf16"`` or torch's dtype; None: the fp32 they are added up in.
        loss_scale: the fp16 loss scale.
    """

    max_norm: float = 0.0
    ddp_bucket_cap_mb: float = 25.0
    communication_dtype: Any = None
    loss_scale: LossScaleConfig = field(default_factory=LossScaleConfig)

    @property
    def communication_precision(self) -> Precision | None:
        """``communication_dtype``, whichever way it was given."""
        given = self.communication_dtype
        if given is None:
            return None
        name = _DTYPE_NAMES.get(str(given), str(given))
        if name not in set(Precision):
            raise ConfigError(f"communication_dtype is one of {', '.join(Precision)}, or None: got {given!r}.")
        return Precision(name)

    def __post_init__(self) -> None:
        super().__post_init__()
        _ = self.communication_precision
        if self.max_norm < 0:
            raise ConfigError(f"max_norm is a gradient norm, or 0 for no clipping: got max_norm={self.max_norm}.")
        _require_positive("gradient reduction", ddp_bucket_cap_mb=self.ddp_bucket_cap_mb)
