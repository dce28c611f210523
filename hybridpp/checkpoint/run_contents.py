"""A model of a run's checkpoint by names, read one full tensor at a time, without a job."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from hybridpp.checkpoint.commit import committed_steps, open_step, step_folder
from hybridpp.checkpoint.folder_kind import why_no_checkpoint
from hybridpp.checkpoint.manifest import Manifest, NewerFormatError
from hybridpp.checkpoint.plain_values import decode
from hybridpp.checkpoint.reader import fill, plan_reads, verify_file
from hybridpp.checkpoint.remote_path import AnyPath
from hybridpp.checkpoint.safetensors_file import StoredSpec
from hybridpp.checkpoint.writer import Holding
from hybridpp.errors import CheckpointError, ConfigError, text_of


def chosen_step(path: AnyPath, step: int | None) -> int:
    """A step that has a checkpoint; None: the newest.

    Raises:
        CheckpointError: there is none.
    """
    found = committed_steps(path)
    if not found:
        raise CheckpointError(f"{why_no_checkpoint(path)}Pass the folder that booster.save was given.")
    if step is not None and step not in found:
        raise CheckpointError(f"{path} holds no checkpoint of step {step}. Choose one of {found}.")
    return found[0] if step is None else step


def open_verified(
    path: AnyPath, step: int | None, on_read: Callable[[int], Any] | None = None
) -> tuple[AnyPath, Manifest]:
    """The folder and the manifest of a step, all of whose files have the digests that they were written with.

    Args:
        path: the folder of checkpoints.
        step: None: the newest.
        on_read: called with the number of bytes of each file, after it.

    Raises:
        CheckpointError: there is no such checkpoint, or it is damaged.
    """
    number = chosen_step(path, step)
    folder, manifest = step_folder(path, number), open_chosen(path, number)
    for name in sorted(manifest.files):
        try:
            verify_file(folder, manifest, name)
        except CheckpointError as error:
            raise _damaged(path, number, error) from error
        if on_read is not None:
            on_read(manifest.files[name].nbytes)
    return folder, manifest


def open_chosen(path: AnyPath, step: int) -> Manifest:
    """The manifest of a step that was chosen.

    Raises:
        CheckpointError: it is damaged, or files are missing.
    """
    try:
        return open_step(path, step)
    except NewerFormatError as error:
        raise CheckpointError(f"{step_folder(path, step)} cannot be read: {text_of(error)}.") from error
    except CheckpointError as error:
        raise _damaged(path, step, error) from error


def _damaged(path: AnyPath, step: int, error: CheckpointError) -> CheckpointError:
    return CheckpointError(
        f"step {step} in {path} cannot be used: {text_of(error)}. Choose an intact step by --step: hybridpp "
        "checkpoint verify finds them."
    )


def full_tensor(folder: AnyPath, manifest: Manifest, key: str) -> Tensor:
    """A tensor of a checkpoint, complete.

    Raises:
        CheckpointError: it is not there, or a file is broken.
    """
    if key not in manifest.tensors:
        raise CheckpointError(f"{folder} holds no tensor {key}")
    entry = manifest.tensors[key]
    full = torch.empty(entry.shape, dtype=getattr(torch, entry.dtype))
    fill(folder, plan_reads(manifest.tensors, [Holding.of_all(key, full)]))
    return full


class StoredRunModel:
    """A model of a checkpoint.

    Args:
        folder: of the step.
        manifest: of the checkpoint.
        index: of the model; None: the only one.
        dtype: of floating-point weights; None: that which each had before boost.

    Attributes:
        class_name: of the model.
        aliases: other names of tied weights, each with the name that is stored.
        config: of a model of transformers, as JSON; None: there is none.
        specs: of the weights and buffers, by name.

    Raises:
        ConfigError: there are several models, or fewer.
    """

    def __init__(self, folder: AnyPath, manifest: Manifest, index: int | None, dtype: torch.dtype | None):
        models = manifest.state["models"]
        if index is None and len(models) > 1:
            listed = ", ".join(f"{n} ({model['class']})" for n, model in enumerate(models))
            raise ConfigError(f"{folder} holds several models: {listed}. Choose one by --model.")
        if not 0 <= (index or 0) < len(models):
            raise ConfigError(f"{folder} holds {len(models)} models: got --model {index}. The first one is 0.")
        self._folder, self._manifest, self._prefix = folder, manifest, f"model{index or 0}/"
        self._state: Mapping[str, Any] = models[index or 0]
        origin = self._state.get("origin") or {}
        self.class_name: str = self._state["class"]
        self.aliases: dict[str, str] = origin.get("aliases", {})
        self.config: Mapping[str, Any] | None = origin.get("config")
        prefix = f"{self._prefix}weights/"
        self.specs: dict[str, StoredSpec] = {}
        for key, entry in manifest.tensors.items():
            if key.startswith(prefix):
                stored, name = getattr(torch, entry.dtype), key.removeprefix(prefix)
                before = origin.get("other_dtypes", {}).get(name, origin.get("dtype"))
                wanted = dtype or (getattr(torch, before) if before else stored)
                self.specs[name] = StoredSpec(wanted if stored.is_floating_point else stored, entry.shape)

    def weights(self, names: Iterator[str] | tuple[str, ...]) -> Iterator[Tensor]:
        """Yield weights and buffers, in their dtypes."""
        for name in names:
            yield full_tensor(self._folder, self._manifest, f"{self._prefix}weights/{name}").to(self.specs[name].dtype)

    @property
    def has_optimizer(self) -> bool:
        """Whether there is the state of an optimizer."""
        return self._state["optimizer"] is not None

    def optimizer(self) -> dict[str, Any]:
        """The state of the optimizer as ``state_dict()`` has it, with names instead of numbers; all of its tensors."""
        stored = self._state["optimizer"]
        state: dict[str, dict[str, Any]] = {}
        for name, entries in stored["state"].items():
            state[name] = {
                key: decode(value[0])
                if value
                else full_tensor(self._folder, self._manifest, f"{self._prefix}optimizer/{name}/{key}")
                for key, (_, *value) in entries.items()
            }
        groups = [
            {**{key: decode(value) for key, value in settings.items()}, "params": list(group["names"])}
            for settings, group in zip(stored["settings"], stored["groups"], strict=True)
        ]
        return {"state": state, "param_groups": groups}
