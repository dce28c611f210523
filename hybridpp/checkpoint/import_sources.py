"""Models in formats of other libraries, by names: weights and, where it has names too, the state of an optimizer."""

import zipfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from hybridpp.checkpoint.dcp_folder import METADATA, DcpFolder
from hybridpp.checkpoint.folder import open_folder
from hybridpp.checkpoint.index import CONFIG
from hybridpp.checkpoint.manifest import STORED_DTYPES
from hybridpp.checkpoint.model_origin import described_origin, model_shell
from hybridpp.checkpoint.read import CheckpointContents, InFile, StoredTensor
from hybridpp.checkpoint.safetensors_file import StoredSpec
from hybridpp.checkpoint.single_file import tied_names
from hybridpp.errors import CheckpointError, HybridppError, named

_MODEL_KEYS = ("model", "model_state_dict", "state_dict")
_OPTIMIZER_KEYS = ("optimizer", "optimizer_state_dict", "optim")
_BY_STORED_NAME = {stored: getattr(torch, name) for name, (stored, _) in STORED_DTYPES.items()}


class LazyTensor(NamedTuple):
    """A tensor that is read when it is needed.

    Attributes:
        spec: its dtype and shape.
        load: reads it.
    """

    spec: StoredSpec
    load: Callable[[], Tensor]


@dataclass
class ImportSource:
    """A model that is imported.

    Attributes:
        kind: of the source, in words.
        weights: by name.
        state: of the optimizer: for each parameter, its entries, each a value or a tensor.
        groups: the settings of the optimizer's groups, with the names of their parameters under ``"params"``; None:
            there is no state that could be used.
        no_optimizer: why not.
        class_name: of the model.
        origin: see :func:`hybridpp.checkpoint.model_origin.described_origin`.
    """

    kind: str
    weights: dict[str, LazyTensor]
    state: dict[str, dict[str, Any]] = field(default_factory=dict)
    groups: list[dict[str, Any]] | None = None
    no_optimizer: str = "the source has none"
    class_name: str = "imported model"
    origin: dict[str, Any] | None = None


def open_source(path: Path) -> ImportSource:
    """Open a DCP folder, a file of ``torch.save``, or a file or folder of safetensors.

    Raises:
        CheckpointError: it is none of these, is broken, or would run code.
    """
    try:
        return _opened(path)
    except (AttributeError, IndexError, KeyError, TypeError, ValueError, RuntimeError) as error:
        if isinstance(error, HybridppError):
            raise
        raise CheckpointError(
            f"{path} is not in a form that is imported: {named(error)}. Pass a folder of transformers "
            "or of torch.distributed.checkpoint, a file of safetensors, or a state_dict() that torch.save wrote."
        ) from error


def _opened(path: Path) -> ImportSource:
    if not path.exists():
        raise CheckpointError(f"there is no folder or file {path}. Pass what is to be imported.")
    if path.is_dir() and not any(path.iterdir()):
        raise CheckpointError(f"{path} is empty. Pass the folder or file that is to be imported.")
    if (path / METADATA).is_file():
        return _of_dcp(DcpFolder(path))
    if path.is_file() and path.suffix != ".safetensors":
        return _of_state(_loaded(path), path)
    return _of_folder(path)


def _of_folder(path: Path) -> ImportSource:
    """A Hugging Face folder, with the names of the class in its configuration; or tensors under their own names."""
    shell: nn.Module = nn.Module()
    if (path / CONFIG).is_file():
        shell = model_shell(None, None, path)
    contents = open_folder(shell, path, strict=True)
    names = dict.fromkeys(contents.shapes)
    aliases: dict[str, str] = {}
    first = {id(tensor): name for name, tensor in reversed(shell.state_dict(keep_vars=True).items())}
    for name, tensor in shell.state_dict(keep_vars=True).items():
        if first[id(tensor)] != name and name in names:
            aliases[name] = first[id(tensor)]
            del names[name]
    weights = {
        name: LazyTensor(StoredSpec(_dtype(stored), contents.shapes[name]), partial(_read, contents, name))
        for name, stored in contents.read(list(names))
    }
    dtypes = {name: weights[name][0].dtype for name in names}
    source = ImportSource("safetensors", {name: weights[name] for name in names})
    if (path / CONFIG).is_file():
        source.kind, source.class_name = "a Hugging Face folder", type(shell).__name__
        source.origin = described_origin(shell, aliases, dtypes)
    return source


def _read(contents: CheckpointContents, name: str) -> Tensor:
    ((_, stored),) = ((found, stored.full()) for found, stored in contents.read([name]))
    return stored


def _dtype(stored: StoredTensor) -> torch.dtype:
    if isinstance(stored, InFile):
        name = stored.handle.get_slice(stored.key).get_dtype()
        if name not in _BY_STORED_NAME:
            raise CheckpointError(
                f"{stored.key} has dtype {name}, which checkpoints of runs cannot hold. Convert it to another dtype."
            )
        found: torch.dtype = _BY_STORED_NAME[name]
        return found
    return stored.full().dtype


def _loaded(path: Path) -> Mapping[str, Any]:
    is_zip = zipfile.is_zipfile(path)
    with path.open("rb") as file:
        if not is_zip and file.read(1) != b"\x80":  # with which pickles of torch.save began before version 1.6
            raise CheckpointError(
                f"{path} is no file of torch.save. Pass a file of torch.save or of safetensors, or a folder of "
                "transformers or of torch.distributed.checkpoint."
            )
    try:
        found = torch.load(path, map_location="cpu", weights_only=True, mmap=is_zip)
    except Exception as error:  # of a broken zip file, a broken pickle, a forbidden one, …
        raise CheckpointError(
            f"{path} cannot be read as a file of torch.save: {named(error)}. Save tensors, numbers, "
            "text, lists and dicts alone."
        ) from error
    if not isinstance(found, dict):
        raise CheckpointError(f"{path} holds a {type(found).__name__}. Save a state dict, or several in a dict.")
    return found


def _of_state(found: Mapping[str, Any], path: Path) -> ImportSource:
    key = next((name for name in _MODEL_KEYS if isinstance(found.get(name), dict)), None)
    model = found if key is None else found[key]
    tensors = {name: tensor for name, tensor in model.items() if isinstance(tensor, Tensor)}
    if not tensors or (key is None and len(tensors) != len(model)):
        raise CheckpointError(
            f"{path} holds no weights, but {sorted(map(str, found))[:8]}. Save the model's state_dict() under 'model'."
        )
    unusual = next((name for name, tensor in tensors.items() if tensor.layout is not torch.strided), None)
    if unusual is not None:
        raise CheckpointError(
            f"{path} cannot be imported: {unusual} is a Tensor of {tensors[unusual].layout}. Save its to_dense()."
        )
    aliases = tied_names(tensors)
    source = ImportSource("a file of torch.save", {n: _given(t) for n, t in tensors.items() if n not in aliases})
    source.origin = described_origin(nn.Module(), aliases, {name: tensor.dtype for name, tensor in tensors.items()})
    optimizer = next((found[name] for name in _OPTIMIZER_KEYS if key is not None and name in found), None)
    if optimizer is not None:
        state = {
            name: {entry: _given(value) if isinstance(value, Tensor) else value for entry, value in entries.items()}
            for name, entries in optimizer.get("state", {}).items()
        }
        _take_optimizer(source, state, optimizer.get("param_groups"))
    return source


def _given(tensor: Tensor) -> LazyTensor:
    return LazyTensor(StoredSpec.of(tensor), lambda: tensor)


def _of_dcp(folder: DcpFolder) -> ImportSource:
    top = {keys[0] for keys in folder.specs}
    model = next((name for name in _MODEL_KEYS if name in top), None)
    weights = {
        ".".join(map(str, keys if model is None else keys[1:])): LazyTensor(spec, partial(folder.tensor, keys))
        for keys, spec in folder.specs.items()
        if model is None or keys[0] == model
    }
    source = ImportSource("a folder of torch.distributed.checkpoint", weights)
    optimizer = next((name for name in _OPTIMIZER_KEYS if name in top), None)
    if optimizer is None or model is None:
        return source
    found: dict[Any, Any] = {}
    for keys, spec in folder.specs.items():
        if keys[0] == optimizer:
            _put(found, keys[1:], LazyTensor(spec, partial(folder.tensor, keys)))
    for keys in folder.others:
        if keys[0] == optimizer:
            _put(found, keys[1:], folder.value(keys))
    groups = _unflattened(found.get("param_groups"))
    _take_optimizer(source, found.get("state", {}), groups)
    return source


def _put(target: dict[Any, Any], keys: Sequence[Any], value: Any) -> None:
    for key in keys[:-1]:
        target = target.setdefault(key, {})
    target[keys[-1]] = value


def _unflattened(value: Any) -> Any:
    """Settings with tuples again, which DCP takes apart into numbered values; tensors are read."""
    if isinstance(value, LazyTensor):
        return value.load()
    if not isinstance(value, dict):
        return value
    if value and all(isinstance(key, int) for key in value):
        return tuple(_unflattened(value[number]) for number in sorted(value))
    return {key: _unflattened(item) for key, item in value.items()}


def _take_optimizer(source: ImportSource, state: Mapping[Any, Any], groups: Any) -> None:
    """Use the state of an optimizer, if it has names."""
    if not isinstance(groups, list | tuple) or not all(isinstance(group, dict) for group in groups):
        source.no_optimizer = "its groups are not in the form of state_dict()"
        return
    numbered = {
        number: name
        for group in groups
        for number, name in zip(group["params"], group.get("param_names", group["params"]), strict=True)
    }
    names = [name for name in numbered.values() if isinstance(name, str)]
    if len(names) != len(numbered) or not set(names) <= set(source.weights) or not set(state) <= set(numbered):
        source.no_optimizer = (
            "its parameters have numbers; make it of model.named_parameters(), or save its state by names"
        )
        return
    source.state = {numbered[number]: dict(entries) for number, entries in state.items()}
    source.groups = [
        {**{key: value for key, value in group.items() if key != "param_names"}, "params": _names(group, numbered)}
        for group in groups
    ]


def _names(group: Mapping[str, Any], numbered: Mapping[Any, str]) -> list[str]:
    return [numbered[number] for number in group["params"]]
