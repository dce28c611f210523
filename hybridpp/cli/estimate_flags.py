"""What ``hybridpp estimate``, ``plan`` and ``profile`` read of their flags."""

from pathlib import Path
from typing import Any, NamedTuple

from torch import nn

from hybridpp.cli.commands.model_options import ModelOptions
from hybridpp.cli.commands.profile import ProfileArguments
from hybridpp.cli.files import read
from hybridpp.cli.meta_model import build, load_config
from hybridpp.cli.own_model import is_own_model, load_own_model
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

# States of the optimizer for each weight.
OPTIMIZERS = {"adam": 2, "sgd-momentum": 1, "sgd": 0}


def device_of(arguments: ModelOptions) -> DeviceProfile:
    """The device that the flags name."""
    name = arguments.device
    device = find_device(name, read(name) if Path(name).suffix == ".json" else None)
    return with_links(device, arguments.links) if arguments.links else device


class GivenModel(NamedTuple):
    """A model on the meta device, and a batch; None: batches are made from its configuration."""

    model: nn.Module
    sample: Any = None


def given_model(arguments: ModelOptions | ProfileArguments) -> GivenModel:
    """The model that the flags name, without a cache of keys and values, which training has no use for."""
    name = arguments.model
    assert name is not None, "profile looks"
    if is_own_model(name):
        return _own(name, arguments)
    config = load_config(name)
    if not isinstance(config, dict) and hasattr(config, "use_cache"):
        config.use_cache = False
    return GivenModel(build(config, arguments.task))


def _own(name: str, arguments: ModelOptions | ProfileArguments) -> GivenModel:
    for flag, value in (("--task", arguments.task), ("--sequence-length", arguments.sequence_length)):
        if value is not None:
            raise ConfigError(f"{flag} is for models of Hugging Face: got --model {name}. Leave it out.")
    own = load_own_model(name)
    if own.sample is None:
        raise ConfigError(
            f"{name} must return a model and a sample batch, which the model is run with. Return both: "
            "return model, batch."
        )
    positional, by_name = own.sample
    if positional and by_name:
        raise ConfigError(f"the sample batch of {name} must be a tensor, a tuple or a dict. Return one of them.")
    return GivenModel(own.model, by_name or positional)


def estimator_of(arguments: ModelOptions, settings: dict[str, Any] | None = None) -> LayoutEstimator:
    """What estimates layouts of the model."""
    model, sample = given_model(arguments)
    given = EstimateInput(
        precision=Precision(arguments.precision),
        device=device_of(arguments),
        num_moments=OPTIMIZERS[arguments.optimizer],
        sequence_length=arguments.sequence_length,
        images=arguments.images,
        sample=sample,
        settings=settings or {},
    )
    return estimates_layouts().layout_estimator(model, given)


def estimates_layouts() -> type[EstimatesLayouts]:
    """The plugin whose layouts are estimated."""
    plugin = plugin_class("hybrid_parallel")
    assert issubclass(plugin, EstimatesLayouts), "it comes with hybridpp"
    return plugin


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
