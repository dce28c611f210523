"""What ``hybridpp estimate``, ``plan`` and ``profile`` read of their flags."""

from pathlib import Path
from typing import Any

from torch import nn

from hybridpp.cli.commands.model_options import ModelOptions
from hybridpp.cli.commands.profile import ProfileArguments
from hybridpp.cli.files import read
from hybridpp.cli.meta_model import build, load_config
from hybridpp.config import Precision
from hybridpp.errors import ConfigError
from hybridpp.estimate import (
    DeviceProfile,
    EstimateInput,
    EstimatesLayouts,
    LayoutEstimator,
    find_device,
    with_links,
)
from hybridpp.plugin import plugin_class

PLUGIN = "hybrid_parallel"
# States of the optimizer for each weight.
OPTIMIZERS = {"adam": 2, "sgd-momentum": 1, "sgd": 0}


def device_of(arguments: ModelOptions) -> DeviceProfile:
    """The device that the flags name."""
    name = arguments.device
    device = find_device(name, read(name) if Path(name).suffix == ".json" else None)
    return with_links(device, arguments.links) if arguments.links else device


def input_of(arguments: ModelOptions, settings: dict[str, Any] | None = None) -> EstimateInput:
    """What is estimated, beside the layout."""
    return EstimateInput(
        precision=Precision(arguments.precision),
        device=device_of(arguments),
        num_moments=OPTIMIZERS[arguments.optimizer],
        sequence_length=arguments.sequence_length,
        settings=settings or {},
    )


def model_of(arguments: ModelOptions | ProfileArguments) -> nn.Module:
    """The model on the meta device, without a cache of keys and values, which training has no use for."""
    assert arguments.model is not None, "profile looks"
    config = load_config(arguments.model)
    if hasattr(config, "use_cache"):
        config.use_cache = False
    return build(config, arguments.task)


def estimator_of(arguments: ModelOptions, settings: dict[str, Any] | None = None) -> LayoutEstimator:
    """What estimates layouts of the model."""
    plugin = plugin_class(PLUGIN)
    assert issubclass(plugin, EstimatesLayouts), "it comes with hybridpp"
    return plugin.layout_estimator(model_of(arguments), input_of(arguments, settings))


def microbatches_of(global_batch: int, num_replicas: int, microbatch_size: int) -> int:
    """Micro-batches of a replica.

    Raises:
        ConfigError: the batch cannot be divided so.
    """
    share = num_replicas * microbatch_size
    if global_batch % share:
        near = sorted({global_batch // share * share, (global_batch // share + 1) * share} - {0})
        raise ConfigError(
            f"a global batch is divided into micro-batches of {microbatch_size} over {num_replicas} replicas: got "
            f"--global-batch {global_batch}. Use {' or '.join(map(str, near))}, or another --microbatch-size."
        )
    return global_batch // share
