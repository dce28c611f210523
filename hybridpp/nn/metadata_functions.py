"""What torch's functions do with tensors: which need no values, which write to one."""

from typing import Any

from torch import Tensor

from hybridpp.nn.torch_private import VERSION

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

# ``__iadd__`` and the like; not ``__iter__``, ``__invert__``.
_OPERATORS = frozenset(("__setitem__", *(f"__i{name[2:]}" for name in dir(Tensor) if name.startswith("__"))))


def writes_first_argument(func: Any) -> bool:
    """Whether a torch function writes to its first argument in place, by its name."""
    name: str = getattr(func, "__name__", "")
    return name in _OPERATORS or (name.endswith("_") and not name.endswith("__"))
