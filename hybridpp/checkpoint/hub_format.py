"""What the folder of a model holds besides weights, and how its files are called, so that its own library reads it.

No library is imported for it: whoever has made a model has imported what it is of.
"""

import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from torch import nn

from hybridpp.checkpoint.index import CONFIG, DIFFUSION, MODEL, WeightNames
from hybridpp.cluster import get_dist_logger
from hybridpp.nn.peft_model import is_peft_model
from hybridpp.nn.pretrained_model import is_pretrained_model

# The method of hub mixins that writes weights, which they call and their subclasses replace.
_WEIGHTS_SAVER = "_save_pretrained"


def _nothing(folder: Path) -> None:
    """There is no config, or transformers writes it."""


class HubFormat(NamedTuple):
    """How the folder of a model is written.

    Attributes:
        names: of the files of weights.
        write_config: writes what is there besides weights, to an empty folder.
        is_one_file: whether the library reads one file of weights only.
    """

    names: WeightNames = MODEL
    write_config: Callable[[Path], None] = _nothing
    is_one_file: bool = False

    @property
    def accepted(self) -> tuple[WeightNames, ...]:
        """Names that are read, the library's first."""
        return (self.names, *(names for names in (MODEL, DIFFUSION) if names != self.names))


def format_of(model: nn.Module) -> HubFormat:
    """The format of the library that a model is of; of one that none is known of, weights alone.

    Known are diffusers (``ModelMixin``, ``ConfigMixin``), ``PyTorchModelHubMixin`` of huggingface_hub, timm and, where
    the weights are planned, transformers.
    """
    if is_pretrained_model(model) or is_peft_model(model):
        return HubFormat()
    if _is_a(model, "diffusers.models.modeling_utils", "ModelMixin"):
        return HubFormat(DIFFUSION, lambda folder: _save_config(model, folder))
    if _is_a(model, "huggingface_hub.hub_mixin", "PyTorchModelHubMixin"):
        return HubFormat(MODEL, lambda folder: _save_mixin(model, folder), is_one_file=True)
    if _is_a(model, "diffusers.configuration_utils", "ConfigMixin"):
        return HubFormat(MODEL, lambda folder: _save_config(model, folder))
    timm = sys.modules.get("timm.models._hub")
    if timm is not None and isinstance(getattr(model, "pretrained_cfg", None), dict):
        return HubFormat(MODEL, lambda folder: timm.save_config_for_hf(model, str(folder / CONFIG)), is_one_file=True)
    if callable(getattr(model, "save_pretrained", None)) and callable(getattr(model, "from_pretrained", None)):
        return HubFormat(MODEL, lambda folder: _warn(model, "save_pretrained"))
    return HubFormat()


def _is_a(model: nn.Module, module: str, kind: str) -> bool:
    found = getattr(sys.modules.get(module), kind, None)
    return found is not None and isinstance(model, found)


def _save_config(model: Any, folder: Path) -> None:
    model.save_config(folder)


def _save_mixin(model: Any, folder: Path) -> None:
    """All that ``save_pretrained`` writes but the weights, of which this rank may have a part."""
    kind: Any = type(model)
    mixin: Any = sys.modules["huggingface_hub.hub_mixin"]
    if inspect.unwrap(getattr(kind, _WEIGHTS_SAVER)) is not getattr(mixin.PyTorchModelHubMixin, _WEIGHTS_SAVER):
        _warn(model, _WEIGHTS_SAVER)
    twin = object.__new__(kind)
    vars(twin).update({**vars(model), _WEIGHTS_SAVER: _nothing})
    kind.save_pretrained(twin, folder)


def _warn(model: nn.Module, method: str) -> None:
    get_dist_logger().warning(
        f"{type(model).__name__} has a {method} of its own, which is not called, as it would need all weights in one "
        f"process: the folder has {MODEL.single} with the names of its state dict. What else its from_pretrained reads "
        "must be written beside it."
    )
