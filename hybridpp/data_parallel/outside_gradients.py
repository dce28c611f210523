"""Gradients that are computed outside of autograd: deferred weight gradients, products in the kernel that sums."""

from collections.abc import Callable, Iterable

from torch import Tensor

from hybridpp.data_parallel.accumulator import GradientHooks
from hybridpp.data_parallel.bucket_reduction import BucketReduction
from hybridpp.data_parallel.reducible_sums import ReducibleSums
from hybridpp.nn.fp32_products import adds_products
from hybridpp.nn.half import HALF_DTYPES


class OutsideGradients:
    """Adds gradients that autograd does not see to the sums, by parameter name.

    Args:
        accumulator: the sums.
        hooks: on what autograd adds; they learn which parameters are reached from outside.
        reduction: over the replicas; None: there is one replica.
        check: raises if no step accumulates gradients.
        fuses_products: whether :meth:`add_product` may be used.
    """

    def __init__(
        self,
        accumulator: ReducibleSums,
        hooks: GradientHooks,
        reduction: BucketReduction | None,
        check: Callable[[], None],
        *,
        fuses_products: bool,
    ):
        self._accumulator, self._hooks, self._reduction, self._check = accumulator, hooks, reduction, check
        self._fuses_products = fuses_products

    def defer(self, names: Iterable[str]) -> None:
        """Note that the running backward pass does not complete these gradients: :meth:`add` follows."""
        if self._reduction is not None:
            self._reduction.defer(names)

    def mark_reached(self, names: Iterable[str]) -> None:
        """Note that :meth:`add` follows for these parameters.

        Raises:
            ConfigError: no step accumulates gradients.
        """
        self._check()
        self._hooks.mark_reached(names)

    def add(self, name: str, gradient: Tensor) -> None:
        """Add to a gradient."""
        self._accumulator.add(name, gradient)

    def takes_products(self, name: str) -> bool:
        """Whether :meth:`add_product` works for a parameter: a matrix in half precision, where a kernel is there."""
        dtype, view = self._accumulator.dtype_of(name), self._accumulator.views.get(name)
        return (
            self._fuses_products
            and view is not None
            and dtype in HALF_DTYPES
            and view.dim() == 2
            and view.is_contiguous()
            and adds_products(view.device, dtype)
        )

    def add_product(self, name: str, a: Tensor, b: Tensor) -> None:
        """Add ``a @ b`` to a gradient, without rounding it before; see :meth:`takes_products`."""
        self._accumulator.add_product(name, a, b)

    def mark_complete(self, name: str) -> None:
        """Note that the last :meth:`add` of the step for this parameter is done."""
        if self._reduction is not None:
            self._reduction.complete(name)
