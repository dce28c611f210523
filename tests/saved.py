"""Folders of tiny models whose weights are all one number, so that a mixture is seen."""

import re

import torch
from torch import nn
from transformers import ViTConfig, ViTForImageClassification

from hybridpp.checkpoint import SaveTarget, open_folder
from hybridpp.errors import CheckpointError

OLD, NEW = 1.0, 2.0
ONE_FILE = "1GB"
SIZES = {"one": ONE_FILE, "two": "4KB", "three": "3KB"}
VIT_SIZES = {"one": ONE_FILE, "two": "1KB", "three": "0.5KB"}
"""Of a file, so that there are as many."""


def plain_model():
    return nn.Sequential(*[nn.Linear(16, 16, bias=False) for _ in range(6)])  # 1 KiB each


def vit(num_labels=3):
    config = ViTConfig(
        hidden_size=4,
        num_hidden_layers=1,
        num_attention_heads=1,
        intermediate_size=4,
        image_size=4,
        patch_size=4,
        num_labels=num_labels,
    )
    return ViTForImageClassification(config)


def filled(model, value):
    return {name: torch.full_like(tensor, value) for name, tensor in model.state_dict().items()}


def save(model, folder, value, size=ONE_FILE):
    SaveTarget(folder, model).write(filled(model, value), torch.float32, size)


def by_us(model, folder):
    """What load_model would read: the one value of all weights; None, if there are none."""
    try:
        contents = open_folder(model, folder, strict=True)
    except CheckpointError as error:
        if re.search("holds no|no file named|there is no folder|does not appear to have", str(error)):
            return None
        raise
    state = model.state_dict()
    assert {name: tuple(tensor.shape) for name, tensor in state.items()} == contents.shapes
    return one_value({name: stored.full() for name, stored in contents.read(list(state))})


def by_transformers(folder):
    try:
        model, info = ViTForImageClassification.from_pretrained(folder, output_loading_info=True)
    except OSError:
        return None
    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys")), info
    value = one_value(dict(model.named_parameters()))
    return value, model.config.num_labels


def one_value(tensors):
    (value,) = {float(element) for tensor in tensors.values() for element in tensor.detach().unique()}
    return value


def leave_pickled(model, folder, value):
    model.config.save_pretrained(folder)
    torch.save(filled(model, value), folder / "pytorch_model.bin")
