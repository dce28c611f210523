"""What stands for weights and buffers that only ranks of other stages have, and for what is computed with them."""

import copy
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import NoneType
from typing import Any, cast

import torch
from torch import Tensor, nn

from hybridpp.errors import ConfigError
from hybridpp.nn.metadata_functions import METADATA_FUNCTIONS
from hybridpp.nn.torch_private import DisableTorchFunctionSubclass, is_view
from hybridpp.partition.containers import tensors_in
from hybridpp.partition.taint import writes_first_argument


def _never() -> bool:
    return False


class ParameterVisibility:
    """Whether ``parameters()`` and ``buffers()`` include what other stages own, and whether code may compute with it.

    They do while the model's forward runs. Container code may compute with it, units of this stage may not.

    Attributes:
        shows_all: whether all are included.
        has_computed: whether something was computed with what this rank does not have since all were last shown.
    """

    def __init__(self) -> None:
        self.shows_all = self.has_computed = False
        self._is_in_unit: Callable[[], bool] = _never

    @property
    def computes(self) -> bool:
        """Whether container code runs, in a forward or in one that is repeated."""
        return self.shows_all and not self._is_in_unit()

    @contextmanager
    def showing_all(self, is_in_unit: Callable[[], bool] = _never) -> Iterator[None]:
        """Inside, all are included.

        A forward may ask for a module's dtype, device or number of parameters, which must be those of one process.

        Args:
            is_in_unit: tells whether the code that runs now is no container code.
        """
        before = self.shows_all, self._is_in_unit
        self.shows_all, self._is_in_unit, self.has_computed = True, is_in_unit, False
        try:
            yield
        finally:
            self.shows_all, self._is_in_unit = before


class AbsentTensor(Tensor):
    """Stands for a parameter that only ranks of other stages have, for a buffer that their units write to, or for what
    container code has computed with one: it has a shape, a dtype and a device, but no values.

    All container code runs on every stage, so it may compute with one, and what comes out is one, too. A trace has
    shown which stages use which parameters. So none is used where it counts (in a unit of this stage, in what the model
    returns, for a Python number), unless the forward differs from its trace; then it is refused, as it is in all other
    code. Numbers are NaN, for functions that lose the class.

    Attributes:
        full_name: of the parameter or buffer.
        is_buffer: whether it is a buffer. A script may write to it, as to all buffers, which changes nothing here.
        visibility: knows whether container code runs.
    """

    full_name: str
    is_buffer: bool
    visibility: ParameterVisibility

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        with DisableTorchFunctionSubclass():
            if func in _WITHOUT_VALUES or (func in _LIKE_SECOND and args and not isinstance(args[0], AbsentTensor)):
                return func(*args, **kwargs)
            absent = next((one for one in tensors_in((args, kwargs)) if isinstance(one, AbsentTensor)), None)
            if absent is None:
                return func(*args, **kwargs)
            writes = bool(args) and (writes_first_argument(func) or func in _SETTERS)
            targets = [*(tensors_in(args[0]) if writes else ()), *tensors_in(kwargs.get("out"))]
            if func not in _SETTERS and any(map(_has_one_number, targets)):
                if absent.is_buffer:
                    return args[0]
                raise absent.refusal(in_step=False)
            if func in _SAME and absent.is_buffer:
                return _pass_on(func(*args, **kwargs), absent)
            is_kept = func in _KEEPING or any(isinstance(one, nn.Parameter) for one in targets)
            if is_kept or not absent.visibility.computes:
                raise absent.refusal(absent.visibility.shows_all)
            result = func(*args, **kwargs)
            made = tensors_in(result)
            if not made and not isinstance(result, _WITHOUT_NUMBERS) and not _is_empty(result):
                raise absent.refusal(in_step=True)
            for one in (*made, *targets):
                if type(one) is Tensor:
                    _pass_on(one, absent)
            absent.visibility.has_computed = True
            return result

    def refusal(self, in_step: bool) -> ConfigError:
        """The error for code that uses its values, in a forward or backward pass of the model or elsewhere."""
        if self.is_buffer:
            return ConfigError(
                f"{self.full_name} is a buffer of another stage, whose module writes to it in the forward: with "
                "pp_size > 1 no other stage has its values. Let that module return what is used elsewhere. To log it, "
                "read it after the step, on the ranks whose model.named_buffers() lists it. Or use pp_size=1."
            )
        start = f"{self.full_name} is a parameter of another stage"
        if in_step:
            return ConfigError(
                f"{start}, and its values are read where the forward that was traced did not read them: with pp_size > "
                "1 a rank has only the weights that its stages use there. What begins later (a penalty of weights "
                "after some steps) must be in every forward, before code that looks at values: multiply it by a "
                "factor, which is 0 at first. To log a weight, read it after the step, on the ranks whose "
                "model.named_parameters() lists it. Or use pp_size=1."
            )
        return ConfigError(
            f"{start}: with pp_size > 1 a rank has the values of its own stages only, those that "
            "model.named_parameters() lists on it. Change weights by going over these, on every rank; "
            "booster.save_model writes all. A penalty of weights is returned by the model's forward, whose code finds "
            "all if every forward computes it."
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        visibility = copy.deepcopy(self.visibility, memo)
        return absent_tensor(self, self.full_name, visibility, self.device, self.dtype, is_buffer=self.is_buffer)


def absent_tensor(
    like: Tensor,
    name: str,
    visibility: ParameterVisibility,
    device: torch.device,
    dtype: torch.dtype,
    *,
    is_buffer: bool = False,
) -> Tensor:
    """What stands for the parameter or buffer ``name``, with one number as memory; ``like`` has its shape."""
    value = float("nan") if dtype.is_floating_point or dtype.is_complex else 0
    placeholder = torch.full((), value, dtype=dtype, device=device).expand(like.shape)
    if type(placeholder) is Tensor:  # else another library's tensor, which is of one class
        absent = _absent(placeholder)
        absent.full_name, absent.is_buffer, absent.visibility = name, is_buffer, visibility
    return placeholder.requires_grad_(like.requires_grad)


def refuse_absent(tree: Any) -> None:
    """Refuse tensors in ``tree`` that a rank does not have.

    Raises:
        ConfigError: there is one.
    """
    for tensor in tensors_in(tree):
        if isinstance(tensor, AbsentTensor):
            raise tensor.refusal(in_step=True)


def plain_again(tensors: Iterable[Any]) -> None:
    """Make plain tensors, of NaN, of those that are absent."""
    for tensor in tensors:
        if isinstance(tensor, AbsentTensor):
            _plain(tensor)


def overwritten(tensor: Tensor, values: Tensor) -> Tensor:
    """The tensor with other values, which are there."""
    if isinstance(tensor, AbsentTensor):
        _plain(tensor)
    return tensor.copy_(values)


def _plain(absent: "AbsentTensor") -> None:
    vars(absent).clear()
    absent.__class__ = Tensor  # type: ignore[assignment]  # what it was made of


def _pass_on(tensor: Tensor, absent: AbsentTensor) -> Tensor:
    """Make an absent tensor of a plain one, of which others may hold references, like another one."""
    vars(_absent(tensor)).update(vars(absent))
    return tensor


def _absent(tensor: Tensor) -> AbsentTensor:
    tensor.__class__ = AbsentTensor
    return cast(AbsentTensor, tensor)


def _has_one_number(tensor: Tensor) -> bool:
    """Whether this stands for a parameter or buffer itself, to which nothing can be written."""
    if not isinstance(tensor, AbsentTensor) or tensor.untyped_storage().nbytes() != tensor.element_size():
        return False
    return tensor.is_buffer or tensor.numel() > 1


def _is_empty(result: Any) -> bool:
    return isinstance(result, tuple | list) and not result


def _of_tensors(*names: str) -> set[Any]:
    """Functions and methods of these names, where torch has them."""
    found = [getattr(owner, name) for name in names for owner in (torch, Tensor) if hasattr(owner, name)]
    return {one if callable(one) else one.__get__ for one in found}


# torch declares no properties
_GRAD, _REQUIRES_GRAD, _DATA = (cast(Any, getattr(Tensor, name)) for name in ("grad", "requires_grad", "data"))
_SETTERS = frozenset((_GRAD.__set__, _DATA.__set__))
_SAME = frozenset((_DATA.__get__, Tensor.detach))
# A text, and gradients.
_KEEPING = frozenset((Tensor.__format__, Tensor.backward))
# What these make has the values of the first argument only.
_LIKE_SECOND = frozenset((Tensor.to, Tensor.type_as, Tensor.view_as, Tensor.expand_as, Tensor.reshape_as))
_WITHOUT_NUMBERS = (NoneType, torch.Size, torch.dtype, torch.device, torch.layout, type)
_WITHOUT_VALUES = (
    METADATA_FUNCTIONS
    | {_GRAD.__get__, _REQUIRES_GRAD.__set__, Tensor.requires_grad_, Tensor.register_hook, Tensor.__repr__}
    | _of_tensors("empty_like", "ones_like", "rand_like", "randint_like", "randn_like", "zeros_like")
    | _of_tensors("new_empty", "new_empty_strided", "new_ones", "new_zeros")
    | _of_tensors("data_ptr", "dense_dim", "dim", "dim_order", "get_device", "has_names", "is_coalesced", "is_complex")
    | _of_tensors("is_conj", "is_contiguous", "is_distributed", "is_floating_point", "is_inference", "is_neg")
    | _of_tensors("is_pinned", "is_same_size", "is_set_to", "is_shared", "is_signed", "nbytes", "ndimension", "numel")
    | _of_tensors("is_mkldnn", "is_mps", "is_quantized", "is_sparse_csr", "is_xpu", "name", "names", "output_nr")
    | _of_tensors("result_type", "retain_grad", "retains_grad", "sparse_dim", "storage_offset", "stride", "type")
    | _of_tensors("untyped_storage")
    | {is_view}
)
