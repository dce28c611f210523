"""Select the entries of a batch that a model's forward accepts; the others are for the criterion only."""

import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from difflib import get_close_matches
from typing import Any, ClassVar

from torch import Tensor

from hybridpp.errors import DataError
from hybridpp.pipeline.criterion_form import CriterionForm, is_target_name

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
        positional: names of the positional arguments, in order.
        form: of the criterion that gets the rest of a batch; None: there is none, or it is not known.
        divided: for numbers of entries of a tuple, how many of them the model got in steps with a criterion.
        selects: whether the script says what the model gets of a batch.
    """

    owner: str
    names: frozenset[str] | None = None
    required: frozenset[str] = frozenset()
    num_positional: int | None = None
    num_required: int = 0
    required_by_name: frozenset[str] = frozenset()
    positional: tuple[str, ...] = ()
    form: CriterionForm | None = None
    divided: tuple[tuple[int, int], ...] = ()
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
            tuple(parameter.name for parameter in parameters if parameter.kind in _POSITIONAL),
        )

    def not_accepted(self, batch: Any) -> list[Any]:
        """The keys of a dict, or the indices of a tuple or list, that the forward does not accept."""
        if isinstance(batch, dict):
            return [] if self.names is None else [name for name in batch if name not in self.names]
        if isinstance(batch, tuple | list) and self.num_positional is not None:
            return list(range(self.num_positional, len(batch)))
        return []

    def extra_entries(self, batch: Any) -> list[Any]:
        """The keys of a dict, or the indices of a tuple or list, that the model is not called with.

        Raises:
            DataError: it is not clear which these are.
        """
        if isinstance(batch, tuple | list):
            return list(range(self.num_taken(len(batch)), len(batch)))
        return self.not_accepted(batch)

    def num_taken(self, count: int) -> int:
        """How many entries of a tuple of ``count`` the model is called with: the first ones.

        Required arguments are filled first. The last entry of a tuple is the target, and goes into an optional argument
        only if that is one by its name. The entries before it go into optional arguments; :meth:`doubtful` says which.

        Raises:
            DataError: the criterion does not tell whether an entry is for an optional argument.
        """
        for known, taken in self.divided:
            if known == count:
                return taken
        most = count if self.num_positional is None else min(count, self.num_positional)
        least = max(self.num_required, 1)
        if most <= least and not (most == count and self.form is CriterionForm.TORCHS_TARGET):
            return most
        if self.form in (CriterionForm.TORCHS_TARGET, CriterionForm.TARGET):
            return max(count - 1, 1) if most == count else most
        if self.num_positional is None:
            return most
        takes_target = is_target_name(self.positional[most - 1])
        if self.form is CriterionForm.BATCH:
            return most if count > most or takes_target else most - 1
        if not (takes_target and most == least + 1):
            raise self._ambiguous(count, least)
        return most

    def doubtful(self, count: int) -> tuple[list[int], list[int]]:
        """Of a tuple of ``count`` entries that the criterion gets as well, those that may be meant otherwise.

        Returns:
            The indices that the model is called without, though an optional argument could take them; and those that
            optional arguments get, though they may be the criterion's.
        """
        if self.form is not CriterionForm.BATCH or self.selects:
            return [], []
        taken, least = self.num_taken(count), max(self.num_required, 1)
        could = count if self.num_positional is None else min(count, self.num_positional)
        is_last_named = taken == could == count and self.num_positional is not None
        last = taken - 1 if is_last_named and is_target_name(self.positional[taken - 1]) else taken
        return list(range(taken, could)), list(range(least, last))

    def _ambiguous(self, count: int, index: int) -> DataError:
        return DataError(
            f"a tuple or list is passed to the model by position (model(*batch)), and entry {index} of {count} may be "
            f"{self.owner}.forward's optional argument {self.positional[index]!r}, or for the criterion only. "
            f"{self.say_which(index)}"
        )

    def say_which(self, index: int) -> str:
        """The way out where it is not clear whether the model gets the entry ``index`` of a tuple."""
        without, with_it = [*range(index)], [*range(index + 1)]
        return (
            f"Say which entries the model gets, with booster.boost(..., model_inputs={without}) or {with_it}; or "
            "return a dict with the forward's names from the collate_fn."
        )

    def model_inputs(self, batch: Any) -> Any:
        """The part of a batch that the model is called with: the accepted keys of a dict, or the first entries.

        Raises:
            DataError: the forward cannot be called with it, or it is not clear with what of it.
        """
        if isinstance(batch, dict):
            extra_entries = self.not_accepted(batch)
            self._check_names(batch, extra_entries)
            return (
                {name: value for name, value in batch.items() if name not in extra_entries} if extra_entries else batch
            )
        if isinstance(batch, tuple | list):
            taken = self.num_taken(len(batch))
            self._check_count(taken, len(batch))
            return batch[:taken] if taken < len(batch) else batch
        self._check_count(1, 1)
        return batch

    def possible_inputs(self, batch: Any) -> list[Any]:
        """What the model may be called with, before the criterion is known: at most two parts of the batch.

        Raises:
            DataError: the forward cannot be called with it.
        """
        if self.form is not None or self.selects or not isinstance(batch, tuple | list):
            return [self.model_inputs(batch)]
        count = len(batch)
        most = count if self.num_positional is None else min(count, self.num_positional)
        least = replace(self, form=CriterionForm.TARGET).num_taken(count)
        self._check_count(most, count)
        return [batch[:taken] for taken in sorted({most, least}, reverse=True)]

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
