"""A configuration of a model of transformers that older versions read, too.

transformers 5 renamed entries of ``config.json``. Version 4 knows the old names only, and takes its defaults where they
are missing: a rotary embedding of another base, without an error. A configuration with both names is read alike by
both, because version 5 accepts the old ones.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

_ROPE = "rope_parameters"
# What was beside rope_scaling before there was rope_parameters.
_OWN_NAMES = ("rope_theta", "partial_rotary_factor")
# Old names of entries, by type of model; of those in rope_parameters and of those beside it.
_RENAMED = {
    "gpt_neox": {"rotary_emb_base": "rope_theta", "rotary_pct": "partial_rotary_factor"},
    "gpt_neox_japanese": {"rotary_emb_base": "rope_theta", "rotary_pct": "partial_rotary_factor"},
    "qwen3_moe": {"num_experts": "num_local_experts"},
}
# Old names of the bases of layers with full and with sliding attention.
_BASES_OF_LAYERS = {
    "gemma3_text": ("rope_theta", "rope_local_base_freq"),
    "modernbert": ("global_rope_theta", "local_rope_theta"),
}
_WITH_PATTERN = ("cohere2", "gemma3_text")


def add_older_names(path: Path) -> None:
    """Let a file of a configuration have old names, too.

    Raises:
        OSError: it cannot be read or written.
    """
    config = json.loads(path.read_text())
    path.write_text(json.dumps(with_older_names(config), indent=2, sort_keys=True) + "\n")


def with_older_names(config: Mapping[str, Any]) -> dict[str, Any]:
    """The configuration with the names of transformers 4.51 in addition, also in those of its parts."""
    nested = {key: with_older_names(value) for key, value in config.items() if _is_part(key, value)}
    return {**_older_names(config), **config, **nested}


def _is_part(key: str, value: Any) -> bool:
    return key.endswith("_config") and isinstance(value, dict) and "model_type" in value


def _older_names(config: Mapping[str, Any]) -> dict[str, Any]:
    kind, rope = config.get("model_type"), config.get(_ROPE) or {}
    found = {"torch_dtype": config["dtype"]} if config.get("dtype") is not None else {}
    renamed, entries = _RENAMED.get(str(kind), {}), {**config, **rope}
    found |= {old: entries[new] for old, new in renamed.items() if new in entries}
    if "rope_theta" in rope:
        found |= {name: rope[name] for name in _OWN_NAMES if name in rope and name not in renamed.values()}
        found |= _scaling(rope)
    elif kind in _BASES_OF_LAYERS:
        layers = (rope.get("full_attention") or {}, rope.get("sliding_attention") or {})
        for old, of_layers in zip(_BASES_OF_LAYERS[kind], layers, strict=True):
            found |= {old: of_layers["rope_theta"]} if "rope_theta" in of_layers else {}
        found |= _scaling(layers[0]) if kind == "gemma3_text" else {}
    if kind in _WITH_PATTERN and (period := _period(config.get("layer_types") or ())):
        found["sliding_window_pattern"] = period
    return found


def _scaling(rope: Mapping[str, Any]) -> dict[str, Any]:
    """What is not the default, without what has a name of its own."""
    if rope.get("rope_type", "default") == "default":
        return {}
    return {"rope_scaling": {name: value for name, value in rope.items() if name not in _OWN_NAMES}}


def _period(layer_types: Sequence[str]) -> int | None:
    """The number of layers of which the last one has full attention; None: there is no such number."""
    for period in range(1, len(layer_types) + 1):
        if all((kind == "full_attention") == (n % period == 0) for n, kind in enumerate(layer_types, start=1)):
            return period
    return None
