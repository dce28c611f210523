"""Whether a model is transformers' own, without importing transformers: that takes 4 s on every rank."""

import inspect
import sys
from typing import TYPE_CHECKING, TypeGuard

from torch import nn

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def is_pretrained_model(module: nn.Module) -> "TypeGuard[PreTrainedModel]":
    """Whether a module is a ``transformers.PreTrainedModel``; whoever has made one has imported transformers."""
    loaded = sys.modules.get("transformers.modeling_utils")
    return loaded is not None and isinstance(module, loaded.PreTrainedModel)


def has_cache_switch(module: nn.Module) -> bool:
    """Whether a module is a transformers model that caches keys and values if its config says so (``use_cache``)."""
    return is_pretrained_model(module) and "use_cache" in inspect.signature(type(module).forward).parameters
