"""What every comparison of an architecture with plain PyTorch has in common."""

import copy
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeAlias
from unittest import mock

import torch
from models.pool import Result
from models.spec_cache import built
from models.zoo import Buildable, DoesNotBuild, Specimen, plain_step
from torch import Tensor

Expected: TypeAlias = tuple[Tensor, dict[str, Tensor]]
"""Loss and gradients of a step in plain PyTorch."""

Comparison: TypeAlias = Callable[[Specimen, Expected], Result]
"""What comes of doing something to a model: right, or what is wrong; numbers that are, it says to ``differ``."""


def failure(error: Exception) -> Result:
    """Of a comparison that raised this."""
    text = " ".join(str(error).split())
    text = text[-400:] if "Traceback" in text else text
    return {"right": False, "error": f"{type(error).__name__}: {text}", "traceback": traceback.format_exc()}


def examine(
    folder: Path,
    architecture: Buildable,
    about: Callable[[Specimen], Result],
    comparisons: Mapping[str, Comparison],
) -> Iterator[Result]:
    """Everything that a table says of one architecture, as it grows.

    Args:
        folder: keeps what was built.
        architecture: to build.
        about: what is said of what was built.
        comparisons: with the keys under which the result holds what comes of them.
    """
    try:
        specimen = built(architecture, folder)
    except DoesNotBuild as error:
        yield {"builds": False, "reason": str(error)}
        return
    result: Result = {"builds": True, "class": type(specimen.model).__name__, **about(specimen)}
    yield result
    torch.manual_seed(0)
    expected = plain_step(copy.deepcopy(specimen.model), specimen.batch, 2)
    for key, compare in comparisons.items():
        found = compare(specimen, expected)
        if not found["right"] and "differ" in found["error"]:
            found = _in_double(specimen, compare) or found
        result[key] = found
        yield result


@contextmanager
def _casts_to_double() -> Iterator[None]:
    """Inside, what a model casts to fp32 by itself (RAFT its coordinates) is fp64."""
    to = Tensor.to

    def widened(self: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        double = [torch.float64 if arg is torch.float32 else arg for arg in args]
        if kwargs.get("dtype") is torch.float32:
            kwargs["dtype"] = torch.float64
        return to(self, *double, **kwargs)

    torch.set_default_dtype(torch.float64)
    try:
        with mock.patch.object(Tensor, "to", widened), mock.patch.object(Tensor, "float", Tensor.double):
            yield
    finally:
        torch.set_default_dtype(torch.float32)


def _in_double(specimen: Specimen, compare: Comparison) -> Result | None:
    """The comparison in fp64, if that removes the difference: it was rounding then."""
    model: Any = copy.deepcopy(specimen.model).double()
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")  # others have no kernel for fp64
    batch = {name: value.double() if value.is_floating_point() else value for name, value in specimen.batch.items()}
    with _casts_to_double():
        try:
            expected = plain_step(copy.deepcopy(model), batch, 2)
        except Exception:
            return None
        found = compare(Specimen(model, batch, specimen.task), expected)
    return found | {"double": True} if found["right"] else None
