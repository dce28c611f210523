"""Hugging Face folders: names and conversions are transformers'; only the requested tensors are read.

Folders on the hub have names, and some layouts, of older versions (separate experts that a model holds stacked).
transformers converts them while it loads. Here it loads once on the meta device, which reads no weight and reports
which names match; its conversions are then run for the requested tensors only.
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

from hybridpp.checkpoint.find_tensors import TensorLocation, find_tensors
from hybridpp.checkpoint.model_origin import check_depth
from hybridpp.checkpoint.read import CheckpointContents, InMemory, StoredTensor, open_tensors, shapes_of
from hybridpp.errors import CheckpointError, named, some_of
from hybridpp.nn.pretrained_model import without_progress_bars


@dataclass
class _Conversion:
    """A conversion of a folder's tensors to a model's tensors, beyond renaming.

    Attributes:
        name: name of the first result.
        rule: transformers' rule; a run consumes it, so copies are run.
        sources: the inputs, each with the pattern of the rule that it matched, in the order that the rule expects.
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
class _TensorSources:
    """Sources of a model's tensors: each is on disk, or the result of a conversion."""

    direct: dict[str, TensorLocation]
    conversions: list[tuple[_Conversion, dict[str, TensorLocation], frozenset[str]]]
    """Each with its sources and results."""

    @property
    def names(self) -> set[str]:
        return {*self.direct, *(name for _, _, made in self.conversions for name in made)}

    def read(self, shell: PreTrainedModel, names: Collection[str]) -> Iterator[tuple[str, StoredTensor]]:
        yield from open_tensors({name: self.direct[name] for name in names if name in self.direct})
        for conversion, sources, made in self.conversions:
            if made.isdisjoint(names):
                continue
            tensors = {key: stored.full() for key, stored in open_tensors(sources)}
            for name, tensor in conversion.run(shell, tensors).items():
                if name in names:
                    yield name, InMemory(tensor)


def open_pretrained(model: PreTrainedModel, path: Path, strict: bool) -> CheckpointContents:
    """Open a folder that ``from_pretrained`` of the model's class can read.

    Raises:
        CheckpointError: it cannot; a file is broken; or, if ``strict``, names are missing or unexpected.
    """
    check_depth(path, model.config.to_dict())
    locations = find_tensors(path, from_pretrained=True)
    shapes_of(locations)  # raises an error that names a broken file
    shell, info = _load(model, path, device_map="meta")
    if strict and (info["missing_keys"] or info["unexpected_keys"]):
        raise CheckpointError(
            f"{path} does not fit {type(model).__name__}: missing {some_of(sorted(info['missing_keys']))}, "
            f"unexpected {some_of(sorted(info['unexpected_keys']))}. Use strict=False to load what fits."
        )
    state = {name: leaf for name, leaf in shell.state_dict(keep_vars=True).items() if isinstance(leaf, Tensor)}
    sources = _recipes(shell, locations)
    known = sources.names
    # A tied weight is on disk under one of its names.
    under = {id(state[name]): name for name in state if name in known}
    found = {name: name if name in known else under.get(id(leaf)) for name, leaf in state.items()}
    shapes = {name: tuple(leaf.shape) for name, leaf in state.items() if name not in info["missing_keys"]}

    def read(names: Collection[str]) -> Iterator[tuple[str, StoredTensor]]:
        asked: dict[str, list[str]] = {}
        others: list[str] = []
        for name in names:
            source = found[name]
            (others if source is None else asked.setdefault(source, [])).append(name)
        for source, stored in sources.read(shell, asked):
            yield from ((name, stored) for name in asked[source])
        if others:
            # Not from safetensors files, or computed (sinusoids): only transformers' load of the complete model has
            # them.
            complete = _load(model, path)[0].state_dict()
            yield from ((name, InMemory(complete[name])) for name in others)

    return CheckpointContents(shapes, read)


def _load(model: PreTrainedModel, path: Path, **options: Any) -> tuple[PreTrainedModel, dict[str, Any]]:
    try:
        with without_progress_bars():
            loaded: Any = type(model).from_pretrained(
                path, output_loading_info=True, ignore_mismatched_sizes=False, weights_only=True, **options
            )
    except Exception as error:  # of a missing file, a broken one, a pickle, a config that is no JSON, …
        raise CheckpointError(
            f"{path} does not hold weights for {type(model).__name__}: {named(error)}. Pass a folder "
            "that save_model or save_pretrained wrote for this model."
        ) from error
    return loaded[0], loaded[1]


def _recipes(shell: PreTrainedModel, locations: Mapping[str, TensorLocation]) -> _TensorSources:
    """Sort a folder's tensors by their results, as transformers' ``convert_and_load_state_dict_in_model`` does."""
    state = shell.state_dict()
    mapping = get_model_conversion_mapping(shell)
    renamings = [rule for rule in mapping if isinstance(rule, WeightRenaming)]
    converters = [rule for rule in mapping if isinstance(rule, WeightConverter)]
    rules = {pattern: rule for rule in converters for pattern in rule.source_patterns}
    prefix = shell.base_model_prefix
    direct: dict[str, TensorLocation] = {}
    conversions: dict[str, _Conversion] = {}
    for key in sorted(locations, key=dot_natural_key):
        name, pattern = rename_source_key(key, renamings, converters, prefix, state)
        if name not in state and key in state:
            name, pattern = rename_source_key(key, [], [], prefix, state)
        if name not in state:
            continue
        if pattern is None:
            direct.setdefault(name, locations[key])
        else:
            conversion = conversions.setdefault(name, _Conversion(name, rules[pattern]))
            conversion.sources.append((key, pattern))
    return _TensorSources(direct, list(_with_results(shell, conversions.values(), locations)))


def _with_results(
    shell: PreTrainedModel, conversions: Iterable[_Conversion], locations: Mapping[str, TensorLocation]
) -> Iterator[tuple[_Conversion, dict[str, TensorLocation], frozenset[str]]]:
    """Each conversion with the names of its results, determined by running it on the meta device."""
    conversions = list(conversions)
    shapes = shapes_of({key: locations[key] for conversion in conversions for key, _ in conversion.sources})
    for conversion in conversions:
        sources = {key: locations[key] for key, _ in conversion.sources}
        empty = {key: torch.empty(shapes[key], device="meta") for key in sources}
        yield conversion, sources, frozenset(conversion.run(shell, empty))
