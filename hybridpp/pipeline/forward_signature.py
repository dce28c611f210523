"""Select the entries of a batch that a model's forward accepts; the others are for the criterion only."""

import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any, ClassVar

from torch import Tensor

from hybridpp.errors import DataError

# Descriptions list at most this many entries.
_MAX_ENTRIES = 8
_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
_NAMED = (inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


@dataclass(frozen=True)
class ForwardSignature:
    """The arguments that a forward accepts.

    Attributes:
        owner: the model's class name, for messages.
        names: accepted keywords; None: any.
        required: names of the required arguments.
        num_positional: the maximum number of positional arguments; None: any number.
        num_required: the minimum number of positional arguments.
        required_by_name: names of the required keyword-only arguments.
        selects: whether the script says what the model gets of a batch.
    """

    owner: str
    names: frozenset[str] | None = None
    required: frozenset[str] = frozenset()
    num_positional: int | None = None
    num_required: int = 0
    required_by_name: frozenset[str] = frozenset()
    selects: ClassVar[bool] = False

    @classmethod
    def of(cls, forward: Callable[..., Any], owner: str) -> "ForwardSignature":
        """Read the signature of ``forward``; a forward without a signature accepts anything."""
        try:
            parameters = inspect.signature(forward).parameters.values()
            # A decorator may pass more arguments than it is called with.
            outermost = inspect.signature(forward, follow_wrapped=False).parameters.values()
        except (TypeError, ValueError):
            return cls(owner)
        kinds = {parameter.kind for parameter in parameters}
        needed = [p for p in outermost if p.default is p.empty and p.kind in (*_POSITIONAL, p.KEYWORD_ONLY)]
        return cls(
            owner,
            None
            if inspect.Parameter.VAR_KEYWORD in kinds
            else frozenset(p.name for p in parameters if p.kind in _NAMED),
            frozenset(parameter.name for parameter in needed),
            None
            if inspect.Parameter.VAR_POSITIONAL in kinds
            else sum(parameter.kind in _POSITIONAL for parameter in parameters),
            sum(parameter.kind in _POSITIONAL for parameter in needed),
            frozenset(parameter.name for parameter in needed if parameter.kind is inspect.Parameter.KEYWORD_ONLY),
        )

    def extra_entries(self, batch: Any) -> list[Any]:
        """The keys of a dict, or the indices of a tuple or list, that the forward does not accept."""
        if isinstance(batch, dict):
            return [] if self.names is None else [name for name in batch if name not in self.names]
        if isinstance(batch, tuple | list) and self.num_positional is not None:
            return list(range(self.num_positional, len(batch)))
        return []

    def model_inputs(self, batch: Any) -> Any:
        """The part of a batch that the model is called with: the accepted keys of a dict, or the first entries.

        Raises:
            DataError: the forward cannot be called with it.
        """
        extra_entries = self.extra_entries(batch)
        if isinstance(batch, dict):
            self._check_names(batch, extra_entries)
            return (
                {name: value for name, value in batch.items() if name not in extra_entries} if extra_entries else batch
            )
        if isinstance(batch, tuple | list):
            self._check_count(len(batch) - len(extra_entries), len(batch))
            return batch[: len(batch) - len(extra_entries)] if extra_entries else batch
        self._check_count(1, 1)
        return batch

    def _check_names(self, batch: dict[str, Any], extra_entries: list[str]) -> None:
        missing = sorted(self.required - batch.keys())
        free = [name for name in self.names or () if name not in batch]
        meant = {name: near for name in extra_entries for near in closest_name(name, free)}
        if missing or meant:
            says = (
                f"needs {', '.join(map(repr, missing))}"
                if missing
                else "takes " + ", ".join(f"{near!r}, not {name!r}" for name, near in meant.items())
            )
            raise DataError(
                f"a dict is passed to the model by keyword (model(**batch)), and the forward of {self.owner} {says}: "
                f"got {', '.join(map(str, batch))}. Name the entries after the forward's arguments; entries with "
                "other names go to the criterion only."
            )

    def _check_count(self, count: int, given: int) -> None:
        if count < self.num_required or self.required_by_name or self.num_positional == 0:
            needs = sorted(self.required) if self.num_required + len(self.required_by_name) else []
            what = f"needs {', '.join(map(repr, needs))}" if needs else "takes no positional argument"
            raise DataError(
                f"a tuple or list is passed to the model by position (model(*batch)), and the forward of {self.owner} "
                f"{what}: got {given} {'entry' if given == 1 else 'entries'}. Return a dict with the forward's names "
                "from the collate_fn."
            )


def closest_name(name: Any, names: Iterable[str]) -> list[str]:
    """The element of ``names`` that ``name`` probably misspells, in a list; an empty list if none is similar."""
    return get_close_matches(name, list(names), n=1, cutoff=0.8) if isinstance(name, str) else []


def describe_arguments(value: Any) -> str:
    """A description of a call's arguments for error notes: containers with the shapes of their tensors."""
    if isinstance(value, Tensor):
        return f"Tensor{list(value.shape)}"
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{name}: {describe_arguments(entry)}' for name, entry in value.items())}}}"
    if isinstance(value, list | tuple):
        entries = ", ".join(map(describe_arguments, value[:_MAX_ENTRIES])) + (
            ", ..." if len(value) > _MAX_ENTRIES else ""
        )
        return f"[{entries}]" if isinstance(value, list) else f"({entries}{',' if len(value) == 1 else ''})"
    return type(value).__name__
