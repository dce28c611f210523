"""What torch's functions do with tensors: which need no values, which write to one."""

from typing import Any, cast

import torch
from torch import Tensor

from hybridpp.nn.torch_private import VERSION, is_view

_PROPERTIES = (
    *("device", "dtype", "grad_fn", "is_cpu", "is_cuda", "is_leaf", "is_meta", "is_nested", "is_sparse"),
    *("itemsize", "layout", "ndim", "requires_grad", "shape"),
)

METADATA_FUNCTIONS = frozenset(
    {
        Tensor.dim,
        Tensor.element_size,
        Tensor.is_complex,
        Tensor.is_floating_point,
        Tensor.is_inference,
        Tensor.nelement,
        Tensor.numel,
        Tensor.size,
        Tensor.__len__,
        *(getattr(Tensor, name).__get__ for name in _PROPERTIES),
        VERSION.__get__,
    }
)
"""As ``__torch_function__`` is given them."""


def functions_named(*names: str) -> set[Any]:
    """Functions and methods of these names, where torch has them."""
    found = [getattr(owner, name) for name in names for owner in (torch, Tensor) if hasattr(owner, name)]
    return {one if callable(one) else one.__get__ for one in found}


_GRAD, _REQUIRES_GRAD = (cast(Any, getattr(Tensor, name)) for name in ("grad", "requires_grad"))
# What these make has the values of the first argument only.
LIKE_SECOND = frozenset((Tensor.to, Tensor.type_as, Tensor.view_as, Tensor.expand_as, Tensor.reshape_as))
# What these make has a number for each of the first argument's.
SAME_SHAPE = functions_named("empty_like", "ones_like", "rand_like", "randint_like", "randn_like", "zeros_like")
WITHOUT_VALUES = (
    METADATA_FUNCTIONS
    | {_GRAD.__get__, _REQUIRES_GRAD.__set__, Tensor.requires_grad_, Tensor.register_hook, Tensor.__repr__}
    | SAME_SHAPE
    | functions_named("new_empty", "new_empty_strided", "new_ones", "new_zeros")
    | functions_named(
        "data_ptr", "dense_dim", "dim", "dim_order", "get_device", "has_names", "is_coalesced", "is_complex"
    )
    | functions_named("is_conj", "is_contiguous", "is_distributed", "is_floating_point", "is_inference", "is_neg")
    | functions_named(
        "is_pinned", "is_same_size", "is_set_to", "is_shared", "is_signed", "nbytes", "ndimension", "numel"
    )
    | functions_named("is_mkldnn", "is_mps", "is_quantized", "is_sparse_csr", "is_xpu", "name", "names", "output_nr")
    | functions_named("result_type", "retain_grad", "retains_grad", "sparse_dim", "storage_offset", "stride", "type")
    | functions_named("untyped_storage")
    | {is_view}
)
"""Those, and what makes tensors without the values, by all names."""

# ``__iadd__`` and the like; not ``__iter__``, ``__invert__``.
_OPERATORS = frozenset(("__setitem__", *(f"__i{name[2:]}" for name in dir(Tensor) if name.startswith("__"))))


def writes_first_argument(func: Any) -> bool:
    """Whether a torch function writes to its first argument in place, by its name."""
    name: str = getattr(func, "__name__", "")
    return name in _OPERATORS or (name.endswith("_") and not name.endswith("__"))
