"""Torch functions that refuse the arguments of a half-precision model, and how to cast these.

A half-precision model computes with fp32 where it uses constants that are not part of its state (rotary tables, ALiBi
slopes): these keep their dtype, and torch promotes the results of additions and multiplications with them. Matrix
products, attention and convolutions do not promote. There autocast rounds to half precision, and so do these rules.

Fourier transforms, decompositions, solvers, distances and quantiles have no kernels for half precision. Autocast
computes them in fp32, and so do these rules; the result stays in fp32.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn import functional

from hybridpp.nn.half import HALF_DTYPES, widened
from hybridpp.nn.torch_private import pytree

Arguments: TypeAlias = tuple[tuple[Any, ...], dict[str, Any]]
CastRule: TypeAlias = Callable[[tuple[Any, ...], dict[str, Any]], Arguments | None]
"""Maps a function's arguments to the arguments to call it with; None leaves them unchanged."""


def _leaves(tree: Any) -> Iterator[Tensor]:
    for leaf in tree:
        if isinstance(leaf, Tensor):
            yield leaf
        elif isinstance(leaf, tuple | list):
            yield from _leaves(leaf)


def _half_dtype(args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.dtype | None:
    """The half-precision dtype of arguments that mix half precision and fp32; None: they do not."""
    half = wide = None
    for leaf in (*_leaves(args), *_leaves(value for key, value in kwargs.items() if key != "out")):
        if leaf.dtype in HALF_DTYPES:
            if half is not None and leaf.dtype is not half:
                return None
            half = leaf.dtype
        elif leaf.dtype is torch.float32:
            # An fp32 weight is there on purpose: torch's error says that the input does not fit.
            if isinstance(leaf, nn.Parameter):
                return None
            wide = leaf.dtype
    return half if wide is not None else None


def _cast(dtype: torch.dtype, tree: Any) -> Any:
    if isinstance(tree, Tensor):
        return tree.to(dtype) if tree.dtype is torch.float32 or tree.dtype in HALF_DTYPES else tree
    return type(tree)(_cast(dtype, leaf) for leaf in tree) if type(tree) in (tuple, list) else tree


def _cast_values(dtype: torch.dtype, tree: Mapping[str, Any]) -> dict[str, Any]:
    return {key: _cast(dtype, value) for key, value in tree.items()}


def _round_all(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments | None:
    """Round all arguments to half precision."""
    half_dtype = _half_dtype(args, kwargs)
    if half_dtype is None:
        return None
    return _cast(half_dtype, args), kwargs | _cast_values(
        half_dtype, {key: x for key, x in kwargs.items() if key != "out"}
    )


def _round_attention_inputs(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments | None:
    """Round queries, keys and values. A mask may stay in fp32, where its large values do not overflow."""
    half_dtype = _half_dtype(args, kwargs)
    of_three = {key: value for key, value in kwargs.items() if key in ("query", "key", "value")}
    if half_dtype is None or all(leaf.dtype is half_dtype for leaf in (*_leaves(args[:3]), *of_three.values())):
        return None
    return (*_cast(half_dtype, args[:3]), *args[3:]), kwargs | _cast_values(half_dtype, of_three)


def _cast_to_target(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments | None:
    """Cast the values to the dtype of the tensor that they are written to."""
    into = args[0].dtype if args and isinstance(args[0], Tensor) else None
    if into is not torch.float32 and into not in HALF_DTYPES:
        return None
    others = {leaf.dtype for leaf in (*_leaves(args[1:]), *_leaves(kwargs.values()))}
    if not others & {torch.float32, *HALF_DTYPES} - {into}:
        return None
    return (args[0], *_cast(into, args[1:])), _cast_values(into, kwargs)


def _cast_assigned(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments | None:
    """The same for assignment with tensor indices; torch converts the values for other indices."""
    return _cast_to_target(args, kwargs) if any(True for _ in _leaves(args[1:2])) else None


def _widen_all(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments | None:
    """Cast half precision to fp32, where there is no kernel for it."""
    values = {key: value for key, value in kwargs.items() if key != "out"}
    if not any(leaf.dtype in HALF_DTYPES for leaf in (*_leaves(args), *_leaves(values.values()))):
        return None
    wide_args, wide_values = pytree.tree_map_only(Tensor, widened, (args, values))
    return wide_args, kwargs | wide_values


_PRODUCTS = (
    *("addbmm", "addmm", "addmv", "baddbmm", "bmm", "dot", "inner", "matmul", "mm", "mv", "prelu", "vdot"),
    *("__matmul__", "__rmatmul__"),
    *("bilinear", "chain_matmul", "conv1d", "conv2d", "conv3d", "einsum", "group_norm", "layer_norm", "linear"),
    *("conv_transpose1d", "conv_transpose2d", "conv_transpose3d", "tensordot"),
    *("grouped_mm", "multi_head_attention_forward", "multi_dot"),
)
_WRITES = (
    *("addbmm_", "addmm_", "addmv_", "baddbmm_", "index_add", "index_add_", "index_copy", "index_copy_"),
    *("index_put", "index_put_", "masked_scatter", "masked_scatter_", "scatter", "scatter_", "scatter_add"),
    "scatter_add_",
)
# Of torch.fft without what only moves elements, and what torch 2.13 has no kernel for on CPUs or on CUDA.
_FOURIER = tuple(
    f"{inverse}{kind}fft{dims}" for inverse in ("", "i") for kind in ("", "r", "h") for dims in ("", "2", "n")
)
_WITHOUT_HALF = (
    *("cholesky", "cholesky_ex", "cholesky_inverse", "cholesky_solve", "cond", "det", "eig", "eigh", "eigvals"),
    *("eigvalsh", "geqrf", "householder_product", "inv", "inv_ex", "inverse", "ldl_factor", "ldl_factor_ex"),
    *("ldl_solve", "lobpcg", "logdet", "lstsq", "lu", "lu_factor", "lu_factor_ex", "lu_solve", "matrix_exp"),
    *("matrix_rank", "ormqr", "pca_lowrank", "pinv", "pinverse", "qr", "slogdet", "solve", "solve_ex"),
    *("solve_triangular", "svd", "svd_lowrank", "svdvals", "tensorinv", "tensorsolve", "triangular_solve", "vander"),
    *("avg_pool3d", "cdist", "complex", "local_response_norm", "nanquantile", "pdist", "polar", "quantile"),
    *("istft", "stft", "view_as_complex"),
)


def _rules_of(names: tuple[str, ...], rule: CastRule, *others: Any) -> dict[Any, CastRule]:
    namespaces = others or (torch, Tensor, functional, torch.linalg)
    return {getattr(namespace, name): rule for namespace in namespaces for name in names if hasattr(namespace, name)}


MIXED_DTYPE_RULES: Mapping[Any, CastRule] = {
    **_rules_of(_PRODUCTS, _round_all),
    **_rules_of(_WRITES, _cast_to_target),
    functional.scaled_dot_product_attention: _round_attention_inputs,
    Tensor.__setitem__: _cast_assigned,
    **_rules_of(_FOURIER, _widen_all, torch.fft),
    **_rules_of(_WITHOUT_HALF, _widen_all),
}
