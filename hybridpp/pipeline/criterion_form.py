"""Which form a user's criterion has: a loss of torch's or a function, and what it returns over samples."""

import functools
import inspect
import re
from enum import StrEnum
from typing import Any

from torch import nn

from hybridpp.errors import ConfigError

_HOMES = ("torch.nn.functional", "torch.nn.modules.loss")
"""The modules of torch's losses, which are called with a tensor and its target, not with a batch."""

REDUCTIONS = {"mean": False, "batchmean": False, "elementwise_mean": False, "sum": True}
"""Whether each reduction adds up over samples, by the names that torch's losses use."""
_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)

_TARGETS = re.compile(
    r"\w*(target|label|truth)\w*|ys?|y_?(true|gt|batch)|gts?|tgts?|true|actuals?|expected|references?"
)
_PREDICTIONS = re.compile(r"\w*(pred|logit|output|y_?hat|scores?)\w*|outs?|o")
_BATCHES = re.compile(r"_*|\w*(input|batch|data|sample|example|item|row|kwargs)\w*|xs?|i|b|d|m?mb|micro|args|features?")


class CriterionForm(StrEnum):
    """What a criterion is called with, besides the outputs of the model.

    Attributes:
        TORCHS_TARGET: the target; one of torch's losses.
        TARGET: the target, where a batch has one entry that the model does not take; else the batch.
        BATCH: the batch.
        OUTPUTS: nothing.
    """

    TORCHS_TARGET = "torchs_target"
    TARGET = "target"
    BATCH = "batch"
    OUTPUTS = "outputs"


def reduction_of(criterion: Any) -> str | None:
    """The reduction that a criterion declares: its attribute ``reduction``, or a bound argument of that name.

    Criteria inside of it do not count: it may divide the sum that an inner criterion returns.

    Raises:
        ConfigError: it declares that it does not reduce; or it is a plain function with an unknown reduction. Those of
            modules may be other libraries' words.
    """
    held = criterion.keywords.get("reduction") if isinstance(criterion, functools.partial) else None
    reduction = held or getattr(criterion, "reduction", None)
    if reduction == "none":
        raise ConfigError(
            f"a criterion must return one number per micro-batch: {name_of(criterion)} has reduction='none'. "
            "Use 'mean' or 'sum', or reduce its result."
        )
    if isinstance(reduction, str) and reduction in REDUCTIONS:
        return reduction
    if reduction is not None and inspect.isfunction(criterion):
        raise ConfigError(
            f"the reduction of a criterion must be 'mean' or 'sum': got {name_of(criterion)}.reduction={reduction!r}. "
            "Without this attribute, what the loss is a mean over is found in the first step."
        )
    return None


def check_reduction(criterion: Any, loss_reduction: str | None) -> str | None:
    """The reduction that a criterion declares, else ``loss_reduction``.

    Raises:
        ConfigError: ``loss_reduction`` is none, or the criterion declares another one.
    """
    if loss_reduction not in (None, "mean", "sum"):
        raise ConfigError(f"loss_reduction must be 'mean', 'sum' or None: got loss_reduction={loss_reduction!r}.")
    reduction = reduction_of(criterion)
    if reduction and loss_reduction and REDUCTIONS[reduction] != REDUCTIONS[loss_reduction]:
        raise ConfigError(
            f"{name_of(criterion)} has reduction={reduction!r}, and boost got loss_reduction={loss_reduction!r}. Give "
            "one of them, or the same."
        )
    return reduction or loss_reduction


def has_option(criterion: Any) -> bool:
    """Whether its reduction is an argument of its class, as of torch's losses and what inherits from them.

    Then a script that uses it need not have said anything of how this criterion is reduced.
    """
    if inspect.isroutine(criterion) or inspect.isclass(criterion):
        return False
    if isinstance(criterion, functools.partial):
        return takes_targets(criterion) or has_option(criterion.func)
    try:
        return "reduction" in inspect.signature(type(criterion).__init__).parameters
    except (TypeError, ValueError):
        return False


def takes_targets(criterion: Any) -> bool:
    """Whether it is one of torch's losses that are called with a tensor and its target, not with a batch."""
    function = criterion
    while isinstance(function, functools.partial) and not function.args:
        function = function.func
    if isinstance(function, nn.Module):
        function = type(function).forward.__get__(function)
    if getattr(function, "__module__", None) not in _HOMES:
        return False
    needed = [p for p in inspect.signature(function).parameters.values() if p.default is p.empty]
    return len(needed) == 2


def is_target_name(name: str) -> bool:
    """Whether an argument of this name is a target: ``target``, ``labels``, ``y_true``, ``gt`` and the like."""
    return _TARGETS.fullmatch(name.lower()) is not None


def is_batch_name(name: str) -> bool:
    """Whether an argument of this name is a whole batch: ``inputs``, ``batch``, ``i`` and the like."""
    return _BATCHES.fullmatch(name.lower()) is not None


def second_argument(criterion: Any) -> str:
    """The name of a criterion's second positional argument; empty if it has none."""
    return (*_arguments(criterion), "", "")[1]


def _arguments(criterion: Any) -> list[str]:
    """The names of its positional arguments, as far as they are known."""
    if isinstance(criterion, nn.Module):
        criterion = criterion.forward
    try:
        return [p.name for p in inspect.signature(criterion).parameters.values() if p.kind in _POSITIONAL]
    except (TypeError, ValueError):
        return []


def check_order(criterion: Any) -> None:
    """Refuse a criterion whose arguments are named as a target and a prediction, in this order.

    Raises:
        ConfigError: they are.
    """
    first, second = (*_arguments(criterion), "", "")[:2]
    is_prediction = _PREDICTIONS.fullmatch(second.lower()) is not None
    if is_target_name(first) and is_prediction and _PREDICTIONS.fullmatch(first.lower()) is None:
        name = name_of(criterion)
        raise ConfigError(
            f"a criterion is called with the model's outputs, then the target: got {name}({first}, {second}). Turn "
            f"them round: criterion=lambda outputs, target: {'loss' if name == '<lambda>' else name}(target, outputs)."
        )


def form_of(criterion: Any) -> CriterionForm:
    """What a criterion is called with.

    A module of two arguments is a loss that takes a target, as torch's are, unless the second one's name says that it
    is the batch. A function takes the batch, unless the name says that it is a target.

    Raises:
        ConfigError: it takes neither two arguments nor one, or the target before the outputs.
    """
    if takes_targets(criterion):
        return CriterionForm.TORCHS_TARGET
    check_order(criterion)
    if num_arguments(criterion) == 1:
        return CriterionForm.OUTPUTS
    name = second_argument(criterion)
    is_loss = isinstance(criterion, nn.Module) and name != "" and not is_batch_name(name)
    return CriterionForm.TARGET if is_loss or is_target_name(name) else CriterionForm.BATCH


def num_arguments(criterion: Any) -> int:
    """2 (outputs and inputs) or 1 (outputs)."""
    try:
        signature = inspect.signature(criterion.forward if isinstance(criterion, nn.Module) else criterion)
    except (TypeError, ValueError, AttributeError):
        return 2
    for count in (2, 1):
        try:
            signature.bind(*[None] * count)
        except TypeError:
            continue
        return count
    raise ConfigError(
        f"a criterion must accept (outputs, inputs) or (outputs): {name_of(criterion)} has the signature "
        f"{signature}. Bind other arguments: criterion=lambda outputs, inputs: ..."
    )


def key_of(criterion: Any) -> Any:
    """Equal for functions of one source around the same values; of other criteria their ``id``."""
    code = getattr(criterion, "__code__", None)
    if code is None:
        return id(criterion)
    held = [cell.cell_contents for cell in criterion.__closure__ or () if not _is_empty(cell)]
    held += [*(criterion.__defaults__ or ()), *(criterion.__kwdefaults__ or {}).values()]
    return code, id(getattr(criterion, "__self__", None)), tuple(map(_key_of_value, held))


def _is_empty(cell: Any) -> bool:
    try:
        cell.cell_contents  # noqa: B018  # raises for a variable that has no value yet
    except ValueError:
        return True
    return False


def _key_of_value(value: Any) -> Any:
    return value if isinstance(value, int | float | str | None) else id(value)


def name_of(criterion: Any) -> str:
    """Its name in errors."""
    return getattr(criterion, "__name__", None) or type(criterion).__name__
