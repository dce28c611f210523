"""Whether a model is transformers' own, without importing transformers: that takes 4 s on every rank."""

import sys
from typing import TYPE_CHECKING, TypeGuard

from torch import nn

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def is_pretrained_model(module: nn.Module) -> "TypeGuard[PreTrainedModel]":
    """Whether a module is a ``transformers.PreTrainedModel``; whoever has made one has imported transformers."""
    loaded = sys.modules.get("transformers.modeling_utils")
    return loaded is not None and isinstance(module, loaded.PreTrainedModel)
