"""Keys and values of the tokens so far, of which every stage keeps those of its own layers."""

from collections.abc import Hashable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers.cache_utils import DynamicCache

from hybridpp.partition.call_options import shapes_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# Of transformers' config.layer_types: layers whose cache is keys and values.
_ATTENTION = ("full_attention", "sliding_attention", "chunked_attention")


def why_no_cache(model: "PreTrainedModel", settings: Mapping[str, Any]) -> str | None:
    """Why a model generates without a cache with these settings of ``generate``; None: it has one."""
    untyped: Any = model
    config = untyped.config.get_text_config(decoder=True)
    if untyped.config.is_encoder_decoder:
        return "the model has an encoder"
    if untyped._is_stateful or not untyped._supports_default_dynamic_cache():
        return "the model keeps another state than keys and values"
    others = sorted({*(getattr(config, "layer_types", None) or ())} - {*_ATTENTION})
    if others:
        return f"the model has layers of the type {others[0]}"
    if getattr(config, "num_kv_shared_layers", 0):
        return "layers of the model read other layers' keys"
    searches = [name for name in ("assistant_model", "prompt_lookup_num_tokens") if settings.get(name) is not None]
    return f"{searches[0]} was given" if searches else None


class StageCache(DynamicCache):
    """The keys and values of this rank's layers, which the attention of each layer extends.

    Attributes:
        length: number of tokens that it holds; the same on every rank, also on one whose layers have not run.
    """

    def __init__(self) -> None:
        super().__init__()
        self.length = 0

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.length

    def get_mask_sizes(self, query_length: Any, layer_idx: int) -> tuple[int, int]:
        # Versions of transformers pass the number of new tokens, or their positions.
        num_new = len(query_length) if isinstance(query_length, Tensor) else query_length
        return self.length + num_new, 0


class _TracedCache(StageCache):
    """Stands for the cache in a trace: results have its shapes, with what the call adds, and nothing is kept."""

    def __init__(self) -> None:
        super().__init__()
        self._added: dict[int, list[Tensor]] = {}

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
        states = key_states, value_states
        before = self._added.get(layer_idx) or [
            one.new_zeros((*one.shape[:-2], self.length, one.shape[-1])) for one in states
        ]
        now = [torch.cat(pair, -2) for pair in zip(before, states, strict=True)]
        self._added[layer_idx] = now
        return tuple(now)


class CachedCalls:
    """Calls of the model with a cache.

    Args:
        cache: that the calls read and extend.
        num_new: number of tokens of the call.
    """

    def __init__(self, cache: StageCache, num_new: int):
        self._cache, self._num_new = cache, num_new

    def keywords(self, *, is_trace: bool) -> dict[str, Any]:
        cache: StageCache = self._cache
        if is_trace:
            cache = _TracedCache()
            cache.length = self._cache.length
        return {"past_key_values": cache, "use_cache": True}

    def key(self, inputs: Mapping[str, Any]) -> Hashable:
        return "cached", self._cache.length, shapes_of(inputs)

    def growth_key(self, inputs: Mapping[str, Any]) -> Hashable | None:
        if not self._cache.length:
            return None
        return "growing", shapes_of(inputs, growing=self._cache.length + self._num_new)

    def result(self, result: Any) -> Any:
        return _without_cache(result)


class UncachedCalls:
    """Calls of a model that could keep a cache, without one."""

    def keywords(self, *, is_trace: bool) -> dict[str, Any]:
        return {"use_cache": False}

    def key(self, inputs: Mapping[str, Any]) -> Hashable:
        return "uncached", shapes_of(inputs)

    def growth_key(self, inputs: Mapping[str, Any]) -> Hashable | None:
        return None

    def result(self, result: Any) -> Any:
        return _without_cache(result)


def _without_cache(result: Any) -> Any:
    """The outputs without the cache, which every rank has of its own layers."""
    if not isinstance(result, dict):
        return result
    return type(result)(**{name: value for name, value in result.items() if name != "past_key_values"})
