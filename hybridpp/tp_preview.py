"""How a plugin would shard the layers of a model: what the command line prints."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import NamedTuple

from torch import nn

from hybridpp.config import ParallelConfig, Precision


class SequenceParallelBlock(NamedTuple):
    """Where a block that runs on shards of sequences gathers and scatters them. Names are relative to the block.

    Attributes:
        gathered: modules whose input is gathered, and whose output is divided by layer.
        scattered: layers whose output is summed over the ranks, of which each keeps its shard (a reduce-scatter).
        replicated: modules that every rank runs on complete sequences.
    """

    gathered: tuple[str, ...]
    scattered: tuple[str, ...]
    replicated: tuple[str, ...]


class TensorParallelPreview(NamedTuple):
    """How the layers of a model are divided over ranks. Keys are names of modules, but for ``shapes``.

    Attributes:
        styles: the style of every divided module; a module that no style describes has only its shapes.
        reasons: why a module stays replicated that one could expect to be divided.
        shapes: shape of what a rank holds of every parameter, by the parameter's name.
        sequence_parallel: blocks that run on shards of sequences.
        sequence_replicated: why other blocks do not.
        differences: layers that the model's own plan (transformers' ``_tp_plan``) divides in another way, as text.
    """

    styles: Mapping[str, str]
    reasons: Mapping[str, str]
    shapes: Mapping[str, tuple[int, ...]]
    sequence_parallel: Mapping[str, SequenceParallelBlock] = {}
    sequence_replicated: Mapping[str, str] = {}
    differences: tuple[str, ...] = ()


class PreviewsTensorParallel(ABC):
    """A plugin that divides layers over ranks: the command ``hybridpp partition --tp-size`` needs it."""

    @classmethod
    @abstractmethod
    def preview_tensor_parallel(
        cls, model: nn.Module, config: ParallelConfig, precision: Precision = Precision.FP32
    ) -> TensorParallelPreview:
        """How ``boost`` would divide a model; the model does not change.

        Args:
            model: with weights, or on the meta device.
            config: ``tp_size`` and the settings of tensor and sequence parallelism count; ``pp_size`` does not.
            precision: of the run: kernels may refuse a shard in half precision.
        """
