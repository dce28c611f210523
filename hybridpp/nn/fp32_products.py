"""Products of half-precision matrices that are added to fp32 sums by the kernel that computes them."""

from functools import cache
from typing import Any

import torch
from torch import Tensor

# The sum of 16 products of this is below the resolution of both half formats at 1.
_SMALL = 2.0**-8


def add_product(total: Tensor, a: Tensor, b: Tensor, keep: bool) -> None:
    """Add ``a @ b``, which is not rounded to the format of ``a`` and ``b``.

    Args:
        total: shape ``[m, n]``, fp32; written to.
        a: shape ``[m, k]``, in half precision.
        b: shape ``[k, n]``, in the same format.
        keep: whether ``total`` has a value; otherwise it is overwritten, whatever it holds.
    """
    addmm: Any = torch.addmm
    addmm(total, a, b, out_dtype=torch.float32, beta=1 if keep else 0, out=total)


@cache
def adds_products(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether :func:`add_product` works on a device for a half format.

    Found out by trying it: only CUDA has the kernel, in earlier releases of torch for sums in half precision only.
    """
    total = torch.ones(16, 16, device=device)
    part = torch.full((16, 16), _SMALL, dtype=dtype, device=device)
    try:
        add_product(total, part, part, keep=True)
        added = bool((total == 1 + 16 * _SMALL**2).all())
        total.fill_(torch.nan)
        add_product(total, part, part, keep=False)
    except (RuntimeError, TypeError):
        return False
    return added and bool((total == 16 * _SMALL**2).all())
