"""What stands for weights and buffers that only ranks of other stages have, and for what is computed with them."""

import copy
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import NoneType
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn

from hybridpp.errors import ConfigError
from hybridpp.nn.metadata_functions import (
    LIKE_SECOND,
    SAME_SHAPE,
    WITHOUT_VALUES,
    functions_named,
    writes_first_argument,
)
from hybridpp.nn.torch_private import DisableTorchFunctionSubclass, current_graph_task_id, pytree
from hybridpp.partition.containers import tensors_in

_T = TypeVar("_T")


def _never() -> bool:
    return False


class ParameterVisibility:
    """Whether ``parameters()`` and ``buffers()`` include what other stages own, and whether code may compute with it.

    They do while the model's forward runs. Container code may compute with it, units of this stage may not.

    Attributes:
        shows_all: whether all are included.
        has_computed: whether something was computed with what this rank does not have since all were last shown.
        of_several: the ids of this rank's parameters that others have, too.
    """

    def __init__(self) -> None:
        self.shows_all = self.has_computed = False
        self.of_several: frozenset[int] = frozenset()
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

    def listed(self, listing: Iterable[_T]) -> Iterable[_T]:
        """What a generator lists, with all included."""
        if self.shows_all:
            return listing
        self.shows_all = True
        try:
            return iter([*listing])
        finally:
            self.shows_all = False


class AbsentTensor(Tensor):
    """Stands for a parameter that only ranks of other stages have, for a buffer that their units write to, or for what
    container code has computed with one: it has a shape, a dtype and a device, but no values.

    All container code runs on every stage, so it may compute with one, and what comes out is one, too. A trace has
    shown which stages use which parameters. So none is used where it counts (in a unit of this stage, in what the model
    returns, for a Python number), unless the forward differs from its trace; then it is refused, as it is in all other
    code. Numbers are NaN, for functions that lose the class.

    A script may go over the parameters of a module inside the model on every rank alike: between steps, writes to one
    do nothing, as its own ranks write it, and what is computed with one without gradients is one, too.

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
            if func in SAME_SHAPE and args and isinstance(args[0], AbsentTensor) and args[0].is_outside_of_steps:
                return args[0].like(func(*args, **kwargs))
            if func in WITHOUT_VALUES or (func in LIKE_SECOND and args and not isinstance(args[0], AbsentTensor)):
                return func(*args, **kwargs)
            absent = next((one for one in tensors_in((args, kwargs)) if isinstance(one, AbsentTensor)), None)
            if absent is None:
                return func(*args, **kwargs)
            if absent.is_outside_of_steps:
                return _outside_of_steps(absent, func, args, kwargs)
            writes = bool(args) and (writes_first_argument(func) or func in _SETTERS)
            targets = [*(tensors_in(args[0]) if writes else ()), *tensors_in(kwargs.get("out"))]
            if func not in _SETTERS and any(map(_has_one_number, targets)):
                if absent.is_buffer:
                    return args[0]
                raise absent.refusal_of_source()
            if func in _SAME and absent.is_buffer:
                return _pass_on(func(*args, **kwargs), absent)
            if any(isinstance(one, nn.Parameter) for one in targets):
                raise absent.refusal_of_source()
            if func in _KEEPING or not absent.visibility.computes:
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

    @property
    def is_outside_of_steps(self) -> bool:
        """Whether neither a forward nor a backward pass runs."""
        return not self.visibility.shows_all and current_graph_task_id() == -1

    def like(self, made: Tensor) -> Tensor:
        """What stands for a tensor that was computed with this one."""
        return absent_tensor(made, self.full_name, self.visibility, made.device, made.dtype, is_buffer=self.is_buffer)

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
            f"all if every forward computes it. {_PAIRS}"
        )

    def refusal_of_source(self) -> ConfigError:
        """The error for code that computes with it and with values of this rank."""
        if self.is_buffer:
            return self.refusal(in_step=False)
        return ConfigError(
            f"{self.full_name} is a parameter of another stage, and is written, or used with what is on this one: with "
            f"pp_size > 1 no rank has the values of both. {_PAIRS} A forward writes to weights of its own block only. "
            "Between steps, what is of neither stage (a mask, noise) is used in place: parameter.mul_(mask)."
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        visibility = copy.deepcopy(self.visibility, memo)
        return absent_tensor(self, self.full_name, visibility, self.device, self.dtype, is_buffer=self.is_buffer)


_PAIRS = (
    "A weight that follows one of another stage (a teacher, a target network in the model) needs both on one rank: "
    "use pp_size=1 (tp_size and zero_stage divide weights, too), or schedule='interleaved' with layers_per_stage "
    "such that equal layers of both are on stages of one rank. For averages of all weights: booster.averaged(model)."
)


def _outside_of_steps(absent: AbsentTensor, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What a function of torch comes to where a script calls it with what is not here."""
    if writes_first_argument(func) or func in _SETTERS:
        # Functions of torch.nn.init are given all arguments by name.
        target, *sources = args or kwargs.values()
        named = kwargs if args else {}
        if isinstance(target, list | tuple):
            return _write_to_some(absent, func, target, sources, named)
        if not isinstance(target, AbsentTensor):
            raise absent.refusal(in_step=False)
        if func is not _GRAD.__set__:
            _refuse_own((sources, named), target)
        if func in _DRAWING:  # so that ranks go on with equal generators
            func(torch.empty(target.shape, dtype=target.dtype, device=target.device), *sources, **named)
        return target
    if func in _KEEPING or tensors_in(kwargs.get("out")) or (absent.is_buffer and func not in _SAME):
        raise absent.refusal(in_step=False)
    # Else nobody could tell on this rank whether a tensor of the script's comes from a weight of this stage.
    if any(not isinstance(one, AbsentTensor) and one.dim() for one in tensors_in((args, kwargs))):
        raise absent.refusal_of_source()
    result = func(*args, **kwargs)
    made = tensors_in(result)
    if any(one.requires_grad for one in made):
        raise absent.refusal(in_step=False)
    if not made and not isinstance(result, _WITHOUT_NUMBERS) and not _is_empty(result):
        raise absent.refusal(in_step=False)
    return pytree.tree_map(lambda one: absent.like(one) if isinstance(one, Tensor) else one, result)


def _write_to_some(
    absent: AbsentTensor, func: Any, targets: list[Any] | tuple[Any, ...], others: list[Any], named: dict[str, Any]
) -> Any:
    """Let a function of lists of tensors (``torch._foreach_lerp_``) write to those that are here."""
    here = [not isinstance(one, AbsentTensor) for one in targets]

    def chosen(argument: Any) -> Any:
        is_parallel = isinstance(argument, list | tuple) and len(argument) == len(here)
        return [one for one, is_here in zip(argument, here, strict=True) if is_here] if is_parallel else argument

    for number, target in enumerate(targets):
        if not here[number]:
            rest = [one[number] for one in (*others, *named.values()) if isinstance(one, list | tuple)]
            _refuse_own(rest, target)
    used = [chosen(one) for one in others], {key: chosen(one) for key, one in named.items()}
    if any(isinstance(one, AbsentTensor) for one in tensors_in(used)):
        raise absent.refusal(in_step=False)
    if any(here):
        func(chosen(targets), *used[0], **used[1])
    return targets


def _refuse_own(sources: Any, target: AbsentTensor) -> None:
    """Refuse to write to a parameter of another rank what this one has, unless that has it, too."""
    for one in tensors_in(sources):
        if isinstance(one, nn.Parameter) and id(one) not in target.visibility.of_several:
            raise target.refusal_of_source()


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


# torch declares no properties
_GRAD, _DATA = (cast(Any, getattr(Tensor, name)) for name in ("grad", "data"))
_SETTERS = frozenset((_GRAD.__set__, _DATA.__set__))
_SAME = frozenset((_DATA.__get__, Tensor.detach))
_DRAWING = functions_named(
    *("bernoulli_", "cauchy_", "exponential_", "geometric_", "log_normal_", "normal_", "random_", "uniform_")
) | {one for name, one in vars(nn.init).items() if name.endswith("_") and callable(one)}
# A text, and gradients.
_KEEPING = frozenset((Tensor.__format__, Tensor.backward))
_WITHOUT_NUMBERS = (NoneType, torch.Size, torch.dtype, torch.device, torch.layout, type)
