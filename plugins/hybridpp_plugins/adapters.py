"""Save and load the adapters of a boosted peft model, in the files that peft itself writes."""

import os
import shutil
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor, nn

from hybridpp.checkpoint import CheckpointContents
from hybridpp.checkpoint.new_output import why_not_written
from hybridpp.checkpoint.read import open_plain
from hybridpp.checkpoint.remote_path import sync
from hybridpp.checkpoint.staging_folder import stage
from hybridpp.errors import CheckpointError, ConfigError, PeerError, some_of
from hybridpp.nn.peft_model import ADAPTER_CONFIG, ADAPTER_WEIGHTS
from hybridpp_plugins.agreement import agree
from hybridpp_plugins.engine import Engine
from hybridpp_plugins.weight_stream import SAVE_CALL, WeightStream


def save_adapters(engine: Engine, path: Path, copy: nn.Module | None = None) -> None:
    """Write the adapters, or those of a copy of the model, on rank 0. Collective: all ranks.

    Raises:
        ConfigError: an adapter is none of the model's tensors.
        CheckpointError: the folder cannot be written; on all ranks.
    """
    _check_known(engine)
    engine.original.uninitialized.check(engine.layout.control)
    stream = WeightStream(engine, copy)
    adapters = engine.original.adapters.values()
    names = sorted({engine.original.first_name(name) for stored in adapters for name in stored.values()})
    (names,) = stream.share([names])
    failure: Exception | None = None
    if engine.layout.control.rank:
        stream.send(names)
    else:
        state = dict(zip(names, stream.read(names), strict=True))
        try:
            with _errors_explained(path):
                _write(engine, path, state)
        except Exception as error:
            failure = error
    agree(engine.layout.control, SAVE_CALL, failure, "writing the adapters")


def _check_known(engine: Engine) -> None:
    model: Any = engine.model
    unknown = [name for name in model.peft_config if name not in engine.original.adapters]
    if unknown:
        kind = str(model.peft_config[unknown[0]].peft_type).removeprefix("PeftType.")
        raise ConfigError(
            f"adapter {unknown[0]!r} ({kind}) is computed when peft saves it, for which a rank would need all of the "
            "model. Save to one file: booster.save_model(model, 'model.safetensors')."
        )


def _write(engine: Engine, path: Path, state: dict[str, Tensor]) -> None:
    if path.exists() and not path.is_dir():
        raise CheckpointError(f"adapters are saved to a folder: {path} is a file. Pass another path.")
    model: Any = engine.model
    folders = {name: Path() if name == "default" else Path(name) for name in model.peft_config}
    for folder in folders.values():
        if folder != Path() and (path / folder).is_symlink():
            raise CheckpointError(
                f"{path / folder} is a link, through which a save does not write. Remove it, or pass another path."
            )
    staging = stage(path)
    try:
        with warnings.catch_warnings():
            # Of tensors that this rank's model lacks: they are written below.
            warnings.simplefilter("ignore")
            model.save_pretrained(str(staging), state_dict=state)
        for adapter, folder in folders.items():
            stored = engine.original.adapters[adapter].items()
            tensors = {key: state[engine.original.first_name(name)].clone() for key, name in stored}
            save_file(tensors, staging / folder / ADAPTER_WEIGHTS, metadata={"format": "pt"})
        for folder in folders.values():
            _replace(staging / folder, path / folder)
        for file in staging.glob("*.md"):
            os.replace(file, path / file.name)
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def _replace(staging: Path, folder: Path) -> None:
    """Move an adapter's files. Where both change, there is no adapter in between: a load fails, and mixes nothing."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in (ADAPTER_WEIGHTS, ADAPTER_CONFIG):
        sync(staging / name)
    config = folder / ADAPTER_CONFIG
    is_same = config.is_file() and config.read_bytes() == (staging / ADAPTER_CONFIG).read_bytes()
    if not is_same:
        config.unlink(missing_ok=True)
        sync(folder)
    os.replace(staging / ADAPTER_WEIGHTS, folder / ADAPTER_WEIGHTS)
    sync(folder)
    os.replace(staging / ADAPTER_CONFIG, config)
    sync(folder)


def holds_adapters(path: Path) -> bool:
    """Whether a folder holds what :func:`save_adapters`, or peft, wrote."""
    return (path / ADAPTER_CONFIG).is_file() or any(path.glob(f"*/{ADAPTER_CONFIG}"))


def open_adapters(engine: Engine, path: Path) -> CheckpointContents:
    """The adapters of a folder, by the model's names.

    Raises:
        ConfigError: an adapter is none of the model's tensors.
        CheckpointError: one is missing, or has a tensor that the model's does not have.
    """
    _check_known(engine)
    parts = [_opened(engine, adapter, path) for adapter in engine.original.adapters]
    shapes = {name: shape for part in parts for name, shape in part.shapes.items()}

    def read(names: Any) -> Iterator[Any]:
        for part in parts:
            yield from part.read([name for name in names if name in part.shapes])

    return CheckpointContents(shapes, read)


def _opened(engine: Engine, adapter: str, path: Path) -> CheckpointContents:
    file = (path if adapter == "default" else path / adapter) / ADAPTER_WEIGHTS
    if not file.is_file():
        raise CheckpointError(f"{path} lacks the adapter {adapter!r}: there is no {file}. Pass another folder.")
    contents = open_plain(file)
    names = {key: engine.original.first_name(name) for key, name in engine.original.adapters[adapter].items()}
    missing, unexpected = sorted(names.keys() - contents.shapes.keys()), sorted(contents.shapes.keys() - names.keys())
    if missing or unexpected:
        raise CheckpointError(
            f"{file} does not fit the adapter {adapter!r} of {type(engine.model).__name__}: missing "
            f"{some_of(missing)}, unexpected {some_of(unexpected)}. Make the adapter from the folder's "
            f"{ADAPTER_CONFIG}."
        )
    keys = {name: key for key, name in names.items()}

    def read(wanted: Any) -> Iterator[Any]:
        for key, stored in contents.read([keys[name] for name in wanted]):
            yield names[key], stored

    return CheckpointContents({names[key]: shape for key, shape in contents.shapes.items()}, read)


@contextmanager
def _errors_explained(path: Path) -> Iterator[None]:
    try:
        yield
    except (CheckpointError, PeerError):
        raise
    except Exception as error:  # of peft, safetensors or the file system
        raise CheckpointError(
            f"{path} cannot be written: {why_not_written(error, path)}. Free disk space, check permissions, or pass "
            "another path."
        ) from error
