"""Models with adapters of the peft library, without importing it: that takes seconds on every rank."""

import sys
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
"""The files of an adapter, in the folder of ``PeftModel.save_pretrained``."""


def is_peft_model(module: nn.Module) -> bool:
    """Whether a module is a ``peft.PeftModel``; whoever has made one has imported peft."""
    loaded = sys.modules.get("peft")
    return loaded is not None and isinstance(module, loaded.PeftModel)


def adapter_names(model: nn.Module) -> dict[str, dict[str, str]]:
    """For each adapter of a complete ``peft.PeftModel``, the model's name of each tensor in the adapter's file.

    An adapter whose file holds tensors that the model does not (prompt learning) has no entry.
    """
    import peft  # noqa: PLC0415  # see above

    state: Mapping[str, Any] = model.state_dict()
    # Whatever peft selects and renames is recognised by its identity.
    marks = {name: torch.empty(0, device="meta") for name in state}
    name_of = {id(mark): name for name, mark in marks.items()}
    found = {}
    for adapter in model.peft_config:  # type: ignore[union-attr]  # of peft's models
        try:
            stored = peft.get_peft_model_state_dict(model, state_dict=marks, adapter_name=adapter)
        except (KeyError, RuntimeError, ValueError):
            continue
        if all(id(mark) in name_of for mark in stored.values()):
            found[adapter] = {key: name_of[id(mark)] for key, mark in stored.items()}
    return found
