"""The entries of a batch that a script selects for the model, where names and positions do not tell them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from hybridpp.errors import ConfigError, DataError
from hybridpp.pipeline.forward_signature import ForwardSignature

InputSelection: TypeAlias = str | int | Sequence[str | int] | Mapping[str, str | int]


@dataclass(frozen=True)
class SelectedInputs(ForwardSignature):
    """A forward that is called with selected entries of a batch.

    Attributes:
        entries: keys of a dict, or indices of a tuple or list.
        keywords: of the forward, one for each entry; None: dicts are passed by their keys, tuples by position.
    """

    entries: tuple[str | int, ...] = ()
    keywords: tuple[str, ...] | None = None
    selects = True

    def extra_entries(self, batch: Any) -> list[Any]:
        """The keys of a dict, or the indices of a tuple or list, that are not selected."""
        if isinstance(batch, dict):
            return [name for name in batch if name not in self.entries]
        if isinstance(batch, tuple | list):
            chosen = {entry + len(batch) if isinstance(entry, int) and entry < 0 else entry for entry in self.entries}
            return [index for index in range(len(batch)) if index not in chosen]
        return []

    def model_inputs(self, batch: Any) -> Any:
        """The selected entries, in a dict if the forward gets them by keyword, else in a tuple.

        Raises:
            DataError: the batch lacks one, or the forward cannot be called with them.
        """
        if not isinstance(batch, dict | tuple | list):
            raise self._lacking("a single tensor")
        entries: Any = self.entries
        try:
            values = [batch[entry] for entry in entries]
        except (KeyError, IndexError, TypeError):
            got = f"a dict of {', '.join(map(str, batch))}" if isinstance(batch, dict) else f"{len(batch)} entries"
            raise self._lacking(got) from None
        names = self.keywords if self.keywords is not None else self.entries if isinstance(batch, dict) else None
        inputs: Any = tuple(values) if names is None else dict(zip(names, values, strict=True))
        refused = self.not_accepted(inputs)
        if refused:
            what = (
                f"no argument {refused[0]!r}" if isinstance(inputs, dict) else f"at most {self.num_positional} entries"
            )
            raise DataError(
                f"model_inputs selects {self._selection()}, and the forward of {self.owner} takes {what}. Select "
                "others, or name its arguments: model_inputs={'argument': 'entry'}."
            )
        if isinstance(inputs, dict):
            self._check_names(inputs, [])
        else:
            self._check_count(len(inputs), len(inputs))
        return inputs

    def _selection(self) -> str:
        return ", ".join(map(repr, self.entries))

    def _lacking(self, got: str) -> DataError:
        return DataError(
            f"model_inputs selects {self._selection()} of a batch: got {got}. Select keys of a dict by name, "
            "entries of a tuple or list by index."
        )


def with_selection(signature: ForwardSignature, model_inputs: InputSelection | None) -> ForwardSignature:
    """``signature`` for calls with the entries ``model_inputs`` of a batch; None: with all that it accepts.

    Raises:
        ConfigError: ``model_inputs`` is not a name, an index, a list of these, or a dict from arguments to these.
    """
    if model_inputs is None:
        return signature
    given: Any = (model_inputs,) if isinstance(model_inputs, str | int) else model_inputs
    keywords = tuple(given) if isinstance(given, Mapping) else None
    entries = tuple(given.values()) if isinstance(given, Mapping) else tuple(given) if _is_list(given) else ()
    are_names = all(isinstance(name, str) for name in keywords or ())
    if not entries or not are_names or not all(map(_is_entry, entries)) or len(set(entries)) < len(entries):
        raise ConfigError(
            "model_inputs must be names or indices of entries of a batch, each once, like ['image'] or [0]; or a dict "
            f"from arguments of the forward to these, like {{'pixel_values': 0}}: got model_inputs={model_inputs!r}."
        )
    return SelectedInputs(**vars(signature), entries=entries, keywords=keywords)


def _is_list(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str | bytes)


def _is_entry(value: Any) -> bool:
    return isinstance(value, str | int) and not isinstance(value, bool)
