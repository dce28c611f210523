"""Attention on tensors of the CPU as torch would run it on a CUDA device: its kernels keep other tensors, or fewer."""

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from torch.overrides import TorchFunctionMode

from hybridpp.nn.torch_private import efficient_attention, flash_attention

_HALF = (torch.float16, torch.bfloat16)
# Wider heads have no flash kernel.
_WIDEST = 256


class CudaAttention(TorchFunctionMode):
    """A context in which :func:`~torch.nn.functional.scaled_dot_product_attention` calls CUDA's operators.

    Use it with :class:`~hybridpp.estimate.Hollow` tensors: CPUs have no kernels for these operators.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is not scaled_dot_product_attention:
            return func(*args, **kwargs)
        result = _attention(*args, **kwargs)
        return func(*args, **kwargs) if result is None else result


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    **more: Any,
) -> Tensor | None:
    """The result of a kernel that keeps no weights; None: there is none for such arguments."""
    if query.dim() != 4 or key.dim() != 4 or value.dim() != 4:
        return None
    scale = more.get("scale")
    width = max(query.shape[-1], value.shape[-1])
    if attn_mask is None and query.dtype in _HALF and query.shape[-1] == value.shape[-1] and width <= _WIDEST:
        result: Tensor = flash_attention(query, key, value, dropout_p, is_causal, scale=scale)[0]
        return result
    heads = query.shape[1]
    if key.shape[1] != heads:
        # This kernel takes no fewer heads of keys.
        key, value = (one.repeat_interleave(heads // one.shape[1], 1) for one in (key, value))
    bias = None
    if attn_mask is not None:
        # Of a mask of truths, torch makes one of numbers.
        bias = torch.empty_like(attn_mask, dtype=query.dtype) if attn_mask.dtype is torch.bool else attn_mask
        bias = bias.expand(*query.shape[:3], key.shape[2])
    result = efficient_attention(query, key, value, bias, torch.is_grad_enabled(), dropout_p, is_causal, scale=scale)[0]
    return result
