"""Every network of monai, with its sizes filled in by the names of its constructor's parameters."""

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from models.batches import Batch
from models.others.recipe import SAMPLES, Foreign, first_input, takes
from torch import nn

LIBRARY = "monai"
SIDE = 32
# Sizes by name; what has a default keeps it where it is not here.
_ALWAYS: dict[str, Any] = {
    "spatial_dims": 2,
    "dimensions": 2,
    "pretrained": False,
    "progress": False,
    "img_size": (SIDE, SIDE),
    "image_size": [SIDE, SIDE],
    "input_image_size": (SIDE, SIDE),
    "in_shape": (1, SIDE, SIDE),
    "input_shape": (SIDE, SIDE),
    "hidden_size": 32,
    "mlp_dim": 64,
    "num_heads": 4,
    "num_layers": 4,
    "feature_size": 12,
    "patch_size": 4,
}
_WANTED: dict[str, Any] = {
    "in_channels": 1,
    "out_channels": 2,
    "channels": (8, 16, 16, 32),
    "encode_channels": (8, 16),
    "decode_channels": (16, 8),
    "hidden_channels": (8, 8, 8, 8),
    "final_conv_channels": (8,),
    "unet_out_channels": 8,
    "strides": (2, 2, 2),
    "kernel_size": (3, 3, 3),
    "upsample_kernel_size": (2, 2),
    "num_classes": 3,
    "classes": 3,
    "label_nc": 3,
    "latent_size": 8,
    "latent_shape": (8,),
    "start_shape": (8, 4, 4),
    "num_channel_initial": 4,
    "depth": 2,
    "num_tokens": 32,
    "max_seq_len": 16,
    "attn_layers_dim": 32,
    "attn_layers_depth": 4,
    "attn_layers_heads": 4,
    "num_language_layers": 2,
    "num_vision_layers": 2,
    "num_mixed_layers": 2,
    "n_layers": 2,
    "num_d": 2,
    "num_layers_d": 2,
    "backbone": "efficientnet-b0",
    "model_name": "efficientnet-b0",
    "scale_factor": 2,
    "block": "basic",
    "layers": (1, 1, 1, 1),
    "block_inplanes": (8, 16, 16, 32),
    "growth_rate": 8,
    "input_size": (SIDE, SIDE),
    "reduction": 2,
    "groups": 1,
    "embed_dim": 12,
    "window_size": (4, 4),
    "depths": (2, 2, 2, 2),
    "encoder_channels": (8, 16),
    "n_classes": 3,
}
# Defaults that are much larger than what a comparison needs, where lists of them have a fixed length.
_SMALLER = {"layers", "blocks_down", "block_config", "features", "init_features", "init_filters", "num_res_blocks"}


def models() -> Iterator[Foreign]:
    """Every class once, under the name that it calls itself."""
    import monai.networks.nets as nets

    kinds = {getattr(nets, name) for name in dir(nets) if isinstance(getattr(nets, name), type)}
    for kind in sorted(kinds, key=lambda kind: kind.__name__):
        if issubclass(kind, nn.Module) and kind.__module__.startswith("monai.networks.nets"):
            yield Foreign(f"{LIBRARY}.{kind.__name__}", partial(_attempts, kind), _batches)


def _attempts(kind: Any) -> Iterator[Any]:
    for smaller in (True, False):
        for changes in ({}, {"in_channels": 3}, {"strides": (1, 2, 2, 2)}, {"strides": (2, 2, 2, 2)}):
            yield partial(_make, kind, smaller, changes)


def _make(kind: Any, smaller: bool, changes: dict[str, Any]) -> nn.Module:
    settings: dict[str, Any] = {}
    for name, parameter in takes(kind).items():
        if name in _ALWAYS:
            settings[name] = _ALWAYS[name]
        elif parameter.default is parameter.empty and name in _WANTED:
            settings[name] = _WANTED[name]
        elif smaller and name in _SMALLER:
            settings[name] = _fewer(parameter.default, 8 if name.startswith("init") else 2)
    settings |= {name: value for name, value in changes.items() if name in settings}
    made: nn.Module = kind(**settings)
    channels = settings.get("in_channels", takes(kind).get("in_channels"))
    made.made_for = getattr(channels, "default", channels)
    return made


def _fewer(value: Any, most: int) -> Any:
    if isinstance(value, list | tuple):
        return type(value)(_fewer(item, most if isinstance(item, int) and item < 24 else 16) for item in value)
    return min(value, most) if type(value) is int else value


def _batches(model: nn.Module) -> Iterator[Batch]:
    generator = torch.Generator().manual_seed(0)
    channels: Any = model.made_for
    first = first_input(model)
    for number in {channels if isinstance(channels, int) else 1: None, 1: None, 3: None}:
        for shape in ((SIDE, SIDE), (2 * SIDE, 2 * SIDE), (SIDE, SIDE, SIDE), ()):
            image = torch.randn(SAMPLES, number, *shape, generator=generator)
            yield {first: image} | _beside(model, image)
    yield {first: torch.randint(32, (SAMPLES, 16), generator=generator)}
    yield {first: torch.randn(SAMPLES, 8, generator=generator)}


def _beside(model: nn.Module, image: torch.Tensor) -> Batch:
    """What else a forward asks for."""
    wanted = [name for name, p in takes(model.forward).items() if p.default is p.empty][1:]
    made: Batch = {}
    for name in wanted:
        if name.startswith("time"):
            made[name] = torch.arange(len(image)) * 10
        elif name in {"seg", "labels"}:
            made[name] = torch.nn.functional.one_hot((image[:, 0] > 0).long(), 3).movedim(-1, 1).float()
        else:
            made[name] = image.clone()
    return made
