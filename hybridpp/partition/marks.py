"""Tell a model, before it is boosted, where to be cut or in which order to run."""

from collections.abc import Callable, Mapping, Sequence
from difflib import get_close_matches
from functools import partial
from typing import Any, Literal, TypeAlias

from torch import nn

from hybridpp.errors import PartitionError

Step: TypeAlias = str | Callable[[Any], Any] | tuple[Callable[[Any], Any], Literal["front", "behind"]]


def find_module(model: nn.Module, name: str) -> nn.Module:
    """The submodule called ``name``.

    Raises:
        PartitionError: there is none; the message has the nearest names.
    """
    names: dict[str, nn.Module] = dict(model.named_modules())
    if name and name in names:
        return names[name]
    near = get_close_matches(name, [known for known in names if known], n=3, cutoff=0.4)
    raise PartitionError(
        f"{type(model).__name__} has no module {name!r}. "
        f"{'Did you mean ' + ' or '.join(near) + '?' if near else 'See model.named_modules().'}"
    )


def annotate_split_points(model: nn.Module, points: Mapping[str, Literal["before", "after"]]) -> None:
    """Mark submodules before or after which the model is to be cut; each mark makes one more stage.

    Args:
        model: not boosted yet.
        points: the side of the cut, by module name.

    Raises:
        PartitionError: a name or a side does not exist.

    Example:
        >>> from torch import nn
        >>> model = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2))
        >>> annotate_split_points(model, {"1": "after"})
        >>> model[1].split_point
        'after'
    """
    for name, side in points.items():
        if side not in ("before", "after"):
            raise PartitionError(f"a cut is before or after a module: got {side!r} for {name!r}.")
        vars(find_module(model, name))["split_point"] = side


def set_execution_sequence(model: nn.Module, sequence: Sequence[Step]) -> None:
    """Let a model's forward be its modules and other callables, one after the other; names stay as they are.

    For a model whose forward is such a chain written out by hand, or that has no forward of its own. The first input
    of a batch goes through the chain; what else the batch holds (labels, say) is left to the criterion.

    Args:
        model: not boosted yet.
        sequence: names of modules, and callables or ``(callable, "behind")``: each gets what the one before returned.
            ``(callable, "front")`` runs in front of what stands before it.

    Raises:
        PartitionError: a name does not exist, or a step is none of these.

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
                f"a step is a module's name, a callable, or (callable, 'front' or 'behind'): got {step!r}."
            )
    model.forward = partial(_run, model, tuple(steps))


def _run(model: nn.Module, steps: tuple[str | Callable[[Any], Any], ...], /, *inputs: Any, **named: Any) -> Any:
    value = next(iter((*inputs, *named.values())))
    for step in steps:
        value = model.get_submodule(step)(value) if isinstance(step, str) else step(value)
    return value
