"""Hugging Face folders: transformers says what is where under which name, and only what is asked for is read.

Folders on the hub have the names of older versions, and some layouts too (experts one by one that a model holds
stacked). transformers converts them while it loads. It is let load once with every tensor on the meta device, which
reads no weight and tells what fits; its conversion is then run for the tensors asked for.
"""

import copy
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key

from hybridpp.checkpoint.read import Contents, InMemory, Place, Stored, find_tensors, open_tensors, shapes_of
from hybridpp.errors import CheckpointError


@dataclass
class _Conversion:
    """Tensors of a folder that make tensors of a model, not just under another name.

    Attributes:
        name: of the first one made.
        rule: of transformers; used up by a run, so run on copies.
        sources: what goes in, each with the pattern of the rule that it matched, in the order that the rule expects.
    """

    name: str
    rule: WeightConverter
    sources: list[tuple[str, str]] = field(default_factory=list)

    def run(self, shell: PreTrainedModel, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        rule = copy.deepcopy(self.rule)
        for key, pattern in self.sources:
            rule.add_tensor(self.name, key, pattern, tensors[key])  # type: ignore[arg-type]  # so do they, to save
        made: dict[str, Any] = rule.convert(self.name, model=shell, config=shell.config)
        return {name: tensor[0] if isinstance(tensor, list) else tensor for name, tensor in made.items()}


@dataclass
class _Recipes:
    """Where the tensors of a model come from: each is on disk as it is, or made by a conversion."""

    direct: dict[str, Place]
    conversions: list[tuple[_Conversion, dict[str, Place], frozenset[str]]]
    """Each with its sources and what it makes."""

    @property
    def names(self) -> set[str]:
        return {*self.direct, *(name for _, _, made in self.conversions for name in made)}

    def read(self, shell: PreTrainedModel, names: Collection[str]) -> Iterator[tuple[str, Stored]]:
        yield from open_tensors({name: self.direct[name] for name in names if name in self.direct})
        for conversion, sources, made in self.conversions:
            if made.isdisjoint(names):
                continue
            tensors = {key: stored.whole() for key, stored in open_tensors(sources)}
            for name, tensor in conversion.run(shell, tensors).items():
                if name in names:
                    yield name, InMemory(tensor)


def open_pretrained(model: PreTrainedModel, path: Path, strict: bool) -> Contents:
    """A folder that ``from_pretrained`` of the model's class reads.

    Raises:
        CheckpointError: it does not; a file is broken; or, if ``strict``, names are missing or unexpected.
    """
    places = find_tensors(path)
    shapes_of(places)  # a broken file is named here
    shell, info = _load(model, path, device_map="meta")
    if strict and (info["missing_keys"] or info["unexpected_keys"]):
        raise CheckpointError(
            f"{path} does not fit {type(model).__name__}: missing {sorted(info['missing_keys'])}, "
            f"unexpected {sorted(info['unexpected_keys'])}. Use strict=False to load what fits."
        )
    state = {name: leaf for name, leaf in shell.state_dict(keep_vars=True).items() if isinstance(leaf, Tensor)}
    recipes = _recipes(shell, places)
    known = recipes.names
    # A tied weight is on disk under one of its names.
    under = {id(state[name]): name for name in state if name in known}
    found = {name: name if name in known else under.get(id(leaf)) for name, leaf in state.items()}
    shapes = {name: tuple(leaf.shape) for name, leaf in state.items() if name not in info["missing_keys"]}

    def read(names: Collection[str]) -> Iterator[tuple[str, Stored]]:
        asked: dict[str, list[str]] = {}
        others: list[str] = []
        for name in names:
            source = found[name]
            (others if source is None else asked.setdefault(source, [])).append(name)
        for source, stored in recipes.read(shell, asked):
            yield from ((name, stored) for name in asked[source])
        if others:
            # Not from safetensors files, or computed (sinusoids): transformers knows how, but for the whole model.
            whole = _load(model, path)[0].state_dict()
            yield from ((name, InMemory(whole[name])) for name in others)

    return Contents(shapes, read)


def _load(model: PreTrainedModel, path: Path, **options: Any) -> tuple[PreTrainedModel, dict[str, Any]]:
    try:
        loaded: Any = type(model).from_pretrained(
            path, output_loading_info=True, ignore_mismatched_sizes=False, **options
        )
    except (OSError, RuntimeError) as error:
        raise CheckpointError(f"{path} does not hold weights for {type(model).__name__}: {error}") from error
    return loaded[0], loaded[1]


def _recipes(shell: PreTrainedModel, places: Mapping[str, Place]) -> _Recipes:
    """Sort a folder's tensors by what they make, as ``convert_and_load_state_dict_in_model`` of transformers does."""
    state = shell.state_dict()
    mapping = get_model_conversion_mapping(shell)
    renamings = [rule for rule in mapping if isinstance(rule, WeightRenaming)]
    converters = [rule for rule in mapping if isinstance(rule, WeightConverter)]
    rules = {pattern: rule for rule in converters for pattern in rule.source_patterns}
    prefix = shell.base_model_prefix
    direct: dict[str, Place] = {}
    conversions: dict[str, _Conversion] = {}
    for key in sorted(places, key=dot_natural_key):
        name, pattern = rename_source_key(key, renamings, converters, prefix, state)
        if name not in state and key in state:
            name, pattern = rename_source_key(key, [], [], prefix, state)
        if name not in state:
            continue
        if pattern is None:
            direct.setdefault(name, places[key])
        else:
            conversion = conversions.setdefault(name, _Conversion(name, rules[pattern]))
            conversion.sources.append((key, pattern))
    return _Recipes(direct, list(_with_results(shell, conversions.values(), places)))


def _with_results(
    shell: PreTrainedModel, conversions: Iterable[_Conversion], places: Mapping[str, Place]
) -> Iterator[tuple[_Conversion, dict[str, Place], frozenset[str]]]:
    """Each conversion with what it makes, found out by running it on the meta device."""
    conversions = list(conversions)
    shapes = shapes_of({key: places[key] for conversion in conversions for key, _ in conversion.sources})
    for conversion in conversions:
        sources = {key: places[key] for key, _ in conversion.sources}
        empty = {key: torch.empty(shapes[key], device="meta") for key in sources}
        yield conversion, sources, frozenset(conversion.run(shell, empty))
