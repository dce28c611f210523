"""Checks of the arguments of saves, and the file suffixes that ``save_model`` writes."""

import sys
from collections.abc import Collection, Mapping
from numbers import Integral
from pathlib import Path
from typing import Any

from hybridpp.config import require_bools
from hybridpp.errors import ConfigError, shown

RUN_PARTS = ("model", "optimizer", "lr_scheduler", "dataloader", "generators", "extras")
"""What a checkpoint of a run has, by the names that ``booster.resume(parts=)`` takes."""
SAFE_SUFFIXES, PICKLED_SUFFIXES = (".safetensors",), (".pt", ".pth", ".bin")


def require_path(path: Any) -> None:
    """Refuse what is no path of a folder or file.

    Raises:
        ConfigError: it is no text and no ``pathlib.Path``, or empty.
    """
    if not isinstance(path, str | Path) or not str(path).strip():
        raise ConfigError(f'a path is a text or a pathlib.Path: got {path!r}. Pass one, for example "outputs/run".')


def run_parts_of(parts: Any) -> frozenset[str]:
    """The parts of a run that are resumed; None: all of :data:`RUN_PARTS`.

    Raises:
        ConfigError: they are no collection of such names, or none is.
    """
    if parts is None:
        return frozenset(RUN_PARTS)
    is_text = isinstance(parts, str)
    names = [parts] if is_text or not isinstance(parts, Collection) else list(parts)
    if is_text or not names or any(name not in RUN_PARTS for name in names):
        raise ConfigError(
            f"parts names what is resumed of a checkpoint, as in parts={{'model', 'optimizer'}}: got "
            f"parts={shown(parts)}. There are {', '.join(RUN_PARTS)}."
        )
    return frozenset(names)


def is_file_name(path: Path) -> bool:
    """Whether a path has the suffix of a weights file, so that it does not name a folder."""
    return path.suffix in SAFE_SUFFIXES + PICKLED_SUFFIXES


def check_save_arguments(
    path: Path,
    *,
    shard: bool,
    size_per_shard: float,
    use_safetensors: bool | None,
    gather_dtensor: bool,
) -> None:
    """Check the arguments of a save.

    Raises:
        ConfigError: an argument has the wrong type, does not fit the path, or is not supported.
    """
    require_bools(shard=shard, gather_dtensor=gather_dtensor)
    check_size_per_shard(size_per_shard)
    if not gather_dtensor:
        raise ConfigError("gather_dtensor=False is not supported: saved weights are unsharded. Leave it out.")
    if use_safetensors is None:
        return
    require_bools(use_safetensors=use_safetensors)
    is_safe = path.suffix not in PICKLED_SUFFIXES or path.is_dir()
    if use_safetensors != is_safe:
        form = "safetensors" if is_safe else "a pickle file of torch.save"
        raise ConfigError(
            f"use_safetensors={use_safetensors} does not fit the path: {path} is written as {form}. Leave it out, or "
            "use a path that ends in .safetensors or in .pt."
        )


def check_size_per_shard(size_per_shard: float) -> None:
    """Check the size limit of a file.

    Raises:
        ConfigError: it is no number above 0.
    """
    if isinstance(size_per_shard, bool) or not isinstance(size_per_shard, int | float) or not size_per_shard > 0:
        raise ConfigError(
            f"size_per_shard must be a number of MB above 0: got {shown(size_per_shard)}. Use, for example, 1024."
        )


def file_bytes_of(size_per_shard: float | None) -> int:
    """The most that a file holds, in bytes, from MB (10**6 bytes); None: there is no limit."""
    return sys.maxsize if size_per_shard is None else max(1, int(size_per_shard * 10**6))


def with_prefix(path: str | Path, prefix: str | None) -> Path:
    """The folder named ``prefix`` in a folder; without a prefix, the path.

    Raises:
        ConfigError: it is no path, the prefix is no name of a folder, or the path is that of a file.
    """
    require_path(path)
    if "://" in str(path):
        raise ConfigError(
            f"weights and single states are written to and read from local paths: got {path}. Pass one, or use "
            "booster.save and booster.resume, which take URLs."
        )
    if not prefix:
        return Path(path)
    if not isinstance(prefix, str) or Path(prefix).name != prefix or prefix == "..":
        raise ConfigError(
            f"prefix must be the name of a folder to make in the path: got {shown(prefix)}. Use a plain name."
        )
    if is_file_name(Path(path)) and not Path(path).is_dir():
        raise ConfigError(f"prefix={prefix!r} names a folder, and {path} ends as a file does. Put it in that name.")
    return Path(path) / prefix


def check_run_arguments(step: int, keep_last: int | None, extras: Any = None) -> None:
    """Check the arguments of a save of a run.

    Raises:
        ConfigError: an argument is no number, or too small; or extras are no dict.
    """
    if extras is not None and not isinstance(extras, Mapping):
        raise ConfigError(f'extras must be a dict: got {extras!r}. Give each value a name, as in {{"best": 0.9}}.')
    if isinstance(step, bool) or not isinstance(step, Integral) or step < 0:
        raise ConfigError(f"step must be a number of steps, 0 or more: got {shown(step)}. Count the run's steps.")
    if keep_last is not None and (isinstance(keep_last, bool) or not isinstance(keep_last, int) or keep_last < 1):
        raise ConfigError(
            f"keep_last must be a number of checkpoints, 1 or more: got {shown(keep_last)}. Leave it out to keep all."
        )
