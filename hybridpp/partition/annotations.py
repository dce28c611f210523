"""Annotate a model before boost: where it is cut, or in which order its modules run."""

from collections.abc import Callable, Mapping, Sequence
from difflib import get_close_matches
from typing import Any, Literal, TypeAlias

from torch import nn

from hybridpp.config import cut_side
from hybridpp.errors import PartitionError
from hybridpp.module_adapter import replace_forward

SequenceStep: TypeAlias = str | Callable[[Any], Any] | tuple[Callable[[Any], Any], Literal["front", "behind"]]


def find_module(model: nn.Module, name: str) -> nn.Module:
    """The submodule called ``name``.

    Raises:
        PartitionError: there is none; the message lists similar names.
    """
    names: dict[str, nn.Module] = dict(model.named_modules())
    if name and name in names:
        return names[name]
    near = get_close_matches(name, [known for known in names if known], n=3, cutoff=0.4)
    raise PartitionError(
        f"{type(model).__name__} has no module {name!r}. "
        f"{'Did you mean ' + ' or '.join(near) + '?' if near else 'See model.named_modules().'}"
    )


def annotate_split_points(model: nn.Module, points: Mapping[str, Any]) -> None:
    """Mark submodules before or after which the model is cut; each mark adds one stage.

    Args:
        model: not boosted yet.
        points: the side of the cut, by module name; members of ``torch.distributed.pipelining.SplitPoint`` are
            accepted.

    Raises:
        PartitionError: a name or a side does not exist.

    Example:
        >>> from torch import nn
        >>> model = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2))
        >>> annotate_split_points(model, {"1": "after"})
        >>> model[1].split_point
        'after'
    """
    for name, given in points.items():
        side = cut_side(given)
        if side not in ("before", "after"):
            raise PartitionError(f"a split point must be 'before' or 'after' a module: got {side!r} for {name!r}.")
        vars(find_module(model, name))["split_point"] = side


def set_execution_sequence(model: nn.Module, sequence: Sequence[SequenceStep]) -> None:
    """Replace a model's forward by a sequence of its modules and other callables; names do not change.

    For a model whose forward is such a sequence, or that has no forward. The first input of a batch is passed through
    the sequence; the rest of the batch (such as labels) is for the criterion.

    Args:
        model: not boosted yet.
        sequence: names of modules, and callables or ``(callable, "behind")``: each gets the result of the previous one.
            ``(callable, "front")`` runs before the previous one.

    Raises:
        PartitionError: a name does not exist, or a step is invalid.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> model = nn.ModuleDict({"body": nn.Linear(2, 4), "head": nn.Linear(4, 1)})
        >>> set_execution_sequence(model, ["body", (lambda x: x.relu(), "behind"), "head"])
        >>> model(torch.ones(3, 2)).shape
        torch.Size([3, 1])
    """
    steps: list[str | Callable[[Any], Any]] = []
    for step in sequence:
        if isinstance(step, str):
            find_module(model, step)
            steps.append(step)
        elif callable(step):
            steps.append(step)
        elif isinstance(step, tuple) and len(step) == 2 and callable(step[0]) and step[1] in ("front", "behind"):
            steps.insert(len(steps) - (step[1] == "front" and bool(steps)), step[0])
        else:
            raise PartitionError(
                f"a step must be a module's name, a callable, or (callable, 'front' or 'behind'): got {step!r}."
            )
    replace_forward(model, _run, model, tuple(steps))


def _run(model: nn.Module, steps: tuple[str | Callable[[Any], Any], ...], first: Any = None, /, **named: Any) -> Any:
    # One positional argument, so that further entries of a tuple are known to be the criterion's.
    value = next(iter(named.values())) if first is None else first
    for step in steps:
        value = model.get_submodule(step)(value) if isinstance(step, str) else step(value)
    return value
