"""How batches are split, and the schedule of their micro-batches."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from hybridpp.config.base import ConfigBase
from hybridpp.errors import ConfigError, shown
from hybridpp.sizes import MAX_PASSES


@dataclass(frozen=True, kw_only=True)
class PipelineGradientCheckpointConfig(ConfigBase):
    """Which activations are recomputed in the backward pass instead of stored.

    The first blocks of a stage are recomputed. Results do not change, dropout included; only time and memory do.

    Attributes:
        gradient_checkpointing_ratio: share of each stage's blocks that are recomputed, rounded down; all if neither
            this nor ``num_ckpt_layers_per_stage`` is given.
        num_ckpt_layers_per_stage: number of recomputed blocks of each stage, in order.
        max_stored_microbatches: number of micro-batches for which a rank stores all activations (counted per stage); it
            recomputes only for further ones; None: it recomputes for all.

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
                f"got {shown(ratio)} and {shown(counts)}."
            )
        if ratio is not None and not (isinstance(ratio, int | float) and 0 <= ratio <= 1):
            raise ConfigError(
                f"gradient_checkpointing_ratio must be from 0 to 1: got gradient_checkpointing_ratio={shown(ratio)}."
            )
        if counts is not None and not (isinstance(counts, list | tuple) and counts and all(map(_is_count, counts))):
            raise ConfigError(
                f"num_ckpt_layers_per_stage needs an integer of at least 0 for every stage: got {shown(counts)}."
            )
        if stored is not None and not _is_count(stored):
            raise ConfigError(
                "max_stored_microbatches must be an integer of at least 0, or None: "
                f"got max_stored_microbatches={shown(stored)}."
            )

    def _values(self) -> tuple[Any, Any, Any]:
        # Typed as Any: a script may pass what the types exclude.
        return self.gradient_checkpointing_ratio, self.num_ckpt_layers_per_stage, self.max_stored_microbatches

    def num_recomputed(self, stage: int, num_blocks: int) -> int:
        """The number of a stage's ``num_blocks`` blocks that are recomputed."""
        if self.num_ckpt_layers_per_stage is not None:
            return self.num_ckpt_layers_per_stage[stage]
        ratio = 1.0 if self.gradient_checkpointing_ratio is None else self.gradient_checkpointing_ratio
        # 0.29 * 100 is a little less than 29.
        return int(ratio * num_blocks + 1e-9)


def _are_dims(value: Any) -> bool:
    entries = value.values() if isinstance(value, Mapping) else value if isinstance(value, list | tuple) else None
    if entries is None:
        return value is None or _is_count(value)
    return all(entry == "list" or _is_rule(entry) or _are_dims(entry) for entry in entries)


def _is_rule(value: Any) -> bool:
    """Whether it says how many rows each sample has: ``("rows", entry)``, or a function of the batch."""
    return callable(value) or (isinstance(value, tuple) and len(value) == 2 and value[0] == "rows")


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


@dataclass(frozen=True, kw_only=True)
class PipelineConfig(ConfigBase):
    """How a batch is split, the schedule of its micro-batches, and activation checkpointing.

    Attributes:
        num_microbatches: micro-batches per batch; a batch of fewer samples gives one per sample. The plugin's default
            is 1 with one stage.
        microbatch_size: samples per micro-batch, instead of ``num_microbatches``.
        schedule: the pipeline schedule: a name (``"1f1b"``, ``"zb-h1"``, …), a file, programs, or a function
            ``(num_ranks, num_microbatches)`` that returns programs; None: ``"1f1b"``, with ``num_model_chunks`` above
            1 ``"interleaved"``.
        num_model_chunks: stages per rank; None: the schedule's default.
        gradient_checkpoint_config: which activations are recomputed in the backward pass, also as a dict of its fields;
            None: none.
        batch_dims: the batch dimension of the batch's tensors, along which they are split: a number for all; or a dict
            by name or a list by position, as deep as the batch is nested, of numbers, of None for what every
            micro-batch gets unsplit, and of ``"list"`` for a list with an entry per sample:
            ``{"src": 1, "mask": None}``. Tensors that are not named are split along dimension 0, and so is a list of as
            many texts as there are samples. ``("rows", "image_grid_thw")``: samples have as many rows as that entry
            says, by a number or a grid; a function of the batch gives the number of rows of each sample. None:
            dimension 0 of all, and rows of images and packed sequences as the names of transformers tell.
        output_dims: the same for the model's outputs, which are concatenated; None: ``batch_dims`` if that is a number,
            else 0.
    """

    num_microbatches: int | None = None
    microbatch_size: int | None = None
    schedule: str | Path | Sequence[Sequence[Any]] | Callable[[int, int], Any] | None = None
    num_model_chunks: int | None = None
    gradient_checkpoint_config: PipelineGradientCheckpointConfig | Mapping[str, Any] | None = None
    batch_dims: int | Mapping[str, Any] | Sequence[Any] | None = None
    output_dims: int | Mapping[str, Any] | Sequence[Any] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("batch_dims", "output_dims"):
            if not _are_dims(getattr(self, name)):
                raise ConfigError(
                    f"{name} must be a dimension of at least 0 for all tensors, or a dict or list of these and None: "
                    "got "
                    f"{name}={shown(getattr(self, name))}. Like {name}={{'src': 1, 'mask': None}}."
                )
        if (self.num_microbatches is None) == (self.microbatch_size is None):
            raise ConfigError(
                "give exactly one of num_microbatches and microbatch_size: "
                f"got num_microbatches={self.num_microbatches}, microbatch_size={self.microbatch_size}. For example, "
                "pass num_microbatches=8: more micro-batches than stages keep the stages busy."
            )
        for name in ("num_microbatches", "microbatch_size"):
            value = getattr(self, name)
            if value is not None and not (_is_count(value) and value >= 1):
                raise ConfigError(f"{name} must be an integer of at least 1: got {name}={shown(value)}.")
        if self.num_microbatches is not None and self.num_microbatches > MAX_PASSES:
            raise ConfigError(
                f"num_microbatches must be at most {MAX_PASSES}, as a schedule is planned action by action: got "
                f"num_microbatches={self.num_microbatches}. Use fewer, of more samples each."
            )
        chunks = self.num_model_chunks
        if chunks is not None and not (_is_count(chunks) and chunks >= 1):
            raise ConfigError(
                f"num_model_chunks must be an integer of at least 1: got num_model_chunks={shown(chunks)}."
            )
        _ = self.recomputation
        if self.schedule is None:
            object.__setattr__(self, "schedule", "interleaved" if chunks and chunks > 1 else "1f1b")
        elif isinstance(self.schedule, type):  # one of torch's, which has a name here
            object.__setattr__(self, "schedule", self.schedule.__name__)

    @property
    def dims_of_outputs(self) -> Any:
        """``output_dims`` with its default applied."""
        if self.output_dims is not None:
            return self.output_dims
        return self.batch_dims if isinstance(self.batch_dims, int) else 0

    @property
    def recomputation(self) -> PipelineGradientCheckpointConfig | None:
        """``gradient_checkpoint_config`` as an object; None: nothing is recomputed."""
        given: Any = self.gradient_checkpoint_config
        if given is None or isinstance(given, PipelineGradientCheckpointConfig):
            return given
        known = [known.name for known in fields(PipelineGradientCheckpointConfig)]
        if not isinstance(given, Mapping) or not set(given) <= set(known):
            raise ConfigError(
                "gradient_checkpoint_config must be a PipelineGradientCheckpointConfig, or a dict of "
                f"{', '.join(known)}: "
                f"got {shown(given)}."
            )
        return PipelineGradientCheckpointConfig(**given)
