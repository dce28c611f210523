"""Number formats, the fp16 loss scale, and the treatment of gradients."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Literal

from hybridpp.config.base import ConfigBase, require_bools, require_positive
from hybridpp.errors import ConfigError, shown

# torch's dtypes as text, because this package imports no torch.
_DTYPE_NAMES = {"torch.float32": "fp32", "torch.float16": "fp16", "torch.bfloat16": "bf16"}


class Precision(StrEnum):
    """The number format that the model computes in; master weights are fp32."""

    FP32 = "fp32"
    FP16 = "fp16"
    BF16 = "bf16"

    @classmethod
    def parse(cls, name: str) -> "Precision":
        """The member called ``name``.

        Raises:
            ConfigError: the name is unknown.
        """
        try:
            return cls(name)
        except ValueError:
            raise ConfigError(f"precision must be one of {', '.join(cls)}: got {shown(name)}.") from None


@dataclass(frozen=True, kw_only=True)
class PrecisionConfig(ConfigBase):
    """The precision, and what computes in fp32 under fp16 or bf16.

    Attributes:
        precision: ``"fp32"``, ``"fp16"`` or ``"bf16"``; None: left open, and fp32 unless somebody else sets it.
        fp32_modules: patterns of module names or classes, in which ``*`` matches anything: ``["*.router"]``. A pattern
            after ``!`` selects modules for half precision: ``["*.mlp", "!*.mlp.fc2"]``, or ``["!LayerNorm"]`` against
            the default. The last pattern that matches applies.
        fp32_norms: whether norms hold fp32 weights and compute in fp32 (True) or use half precision, except batch
            normalisation (False). None: as True, but for torch's LayerNorm and RMSNorm on CUDA, whose kernels hold
            statistics and sums in fp32.
        fp32_losses: whether torch's loss functions that the model's own forward calls compute in fp32; otherwise in the
            format of their inputs.
    """

    precision: Precision | Literal["fp32", "fp16", "bf16"] | None = Precision.FP32
    fp32_modules: Sequence[str] = ()
    fp32_norms: bool | None = None
    fp32_losses: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(
            self, "precision", Precision.FP32 if self.precision is None else Precision.parse(self.precision)
        )
        if self.fp32_norms is not None:
            require_bools(fp32_norms=self.fp32_norms)
        given: Any = self.fp32_modules
        if isinstance(given, str) or not (
            isinstance(given, Sequence) and all(isinstance(pattern, str) and pattern.strip("!") for pattern in given)
        ):
            raise ConfigError(
                f"fp32_modules must be a list of patterns of module names or classes, like ['*.router']: got "
                f"{shown(given)}."
            )


@dataclass(frozen=True, kw_only=True)
class LossScaleConfig(ConfigBase):
    """Dynamic loss scaling for fp16; unused in fp32 and bf16.

    Attributes:
        initial_scale: loss scale of the first step.
        growth_factor: factor on the scale after ``growth_interval`` steps without overflow.
        backoff_factor: factor on the scale at an overflow.
        growth_interval: consecutive steps without overflow before the scale grows.
        hysteresis: number of overflows after which the scale backs off, and then at every further one until it grows;
            steps with an overflow are always skipped. Before the first step without overflow, the scale backs off at
            every one.
        min_scale: smallest loss scale.
        max_scale: largest loss scale.
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
        require_positive(
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
class OptimizerConfig(ConfigBase):
    """What is done to gradients between the backward pass and the weight update.

    Attributes:
        max_norm: global gradient norm to which gradients are clipped; 0: no clipping.
        ddp_bucket_cap_mb: size of a gradient bucket, in MB (2**20 bytes).
        communication_dtype: format of gradients in the reduction over replicas: ``"fp32"``, ``"fp16"``, ``"bf16"`` or
            torch's dtype; None: fp32, in which they are accumulated.
        error_if_nonfinite: what ``optimizer.step`` does if the gradient norm is inf or NaN, in fp32 and bf16. True
            raises and False skips the step, on every rank; both compute the norm at every step. None raises if the norm
            is computed anyway (``max_norm``). fp16 always skips, to adapt its loss scale.
        fused_optimizer: whether an Adam or AdamW whose ``fused`` and ``foreach`` are None uses torch's fused kernels on
            parameters on CUDA (None) or CUDA and CPU (True). A fused optimizer clips and unscales in its kernel, unless
            this is False.
        fused_weight_gradients: whether the kernel that computes gradients of linear layers' half-precision weights adds
            them to the fp32 sums, where the device has such a kernel.
        loss_scale: the fp16 loss scale.
    """

    max_norm: float = 0.0
    ddp_bucket_cap_mb: float = 25.0
    communication_dtype: Any = None
    error_if_nonfinite: bool | None = None
    fused_optimizer: bool | None = None
    fused_weight_gradients: bool = True
    loss_scale: LossScaleConfig = field(default_factory=LossScaleConfig)

    @property
    def fuses_on(self) -> tuple[str, ...]:
        """The kinds of devices on which an optimizer that leaves the choice to torch is fused."""
        if self.fused_optimizer is None:
            return ("cuda",)
        return ("cuda", "cpu") if self.fused_optimizer else ()

    @property
    def communication_precision(self) -> Precision | None:
        """``communication_dtype`` as a :class:`Precision`."""
        given = self.communication_dtype
        if given is None:
            return None
        name = _DTYPE_NAMES.get(str(given), str(given))
        if name not in set(Precision):
            raise ConfigError(
                f"communication_dtype must be one of {', '.join(Precision)}, or None: got {shown(given)}."
            )
        return Precision(name)

    def __post_init__(self) -> None:
        super().__post_init__()
        _ = self.communication_precision
        if self.error_if_nonfinite is not None:
            require_bools(error_if_nonfinite=self.error_if_nonfinite)
        if self.fused_optimizer is not None:
            require_bools(fused_optimizer=self.fused_optimizer)
        if self.max_norm < 0:
            raise ConfigError(f"max_norm must be at least 0, where 0 means no clipping: got max_norm={self.max_norm}.")
        require_positive("gradient reduction", ddp_bucket_cap_mb=self.ddp_bucket_cap_mb)
