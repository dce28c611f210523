"""Functions of a tensor that need none of its values."""

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
