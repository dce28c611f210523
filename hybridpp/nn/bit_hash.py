"""Hashes of the bits of tensors, computed where they lie."""

import torch
from torch import Tensor

# Bytes that are summed before each sum gets its own factor.
_ROW = 8192
# Odd: a product with it is zero only if the other factor is.
_ODD = 0x1E3779B97F4A7C15


@torch.no_grad()
def bit_hash(tensor: Tensor) -> Tensor:
    """A hash of a tensor's bits: a scalar of int64 on its device, for which the host does not wait.

    It differs wherever one element does. Sums are integers, so the order of summation has no effect.
    """
    tensor = tensor.detach()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    data = tensor.reshape(-1).view(torch.uint8)
    full = data.numel() // _ROW * _ROW
    words = data[:full]
    if words.storage_offset() % 8:
        words = words.clone()
    # As words of 64 bits, in which torch sums ten times as fast as in smaller integers.
    rows = words.view(torch.int64).view(-1, _ROW // 8).sum(1)
    rest = data[full:].to(torch.int64)
    return mixed(torch.cat([rows, mixed(rest)[None]]))


def mixed(hashes: Tensor) -> Tensor:
    """One of several, in their order; int64, whose overflow is wanted."""
    return (hashes * (torch.arange(1, len(hashes) + 1, device=hashes.device) * _ODD | 1)).sum()
