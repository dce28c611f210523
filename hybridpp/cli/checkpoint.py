"""``hybridpp checkpoint``: what ``booster.save`` wrote, without a job and without a device."""

from collections import Counter
from collections.abc import Callable
from datetime import datetime
from math import prod
from typing import Any

import typer

from hybridpp.checkpoint.commit import committed_steps, open_step, step_folder, steps
from hybridpp.checkpoint.folder_kind import why_no_checkpoint
from hybridpp.checkpoint.manifest import MANIFEST, Manifest
from hybridpp.checkpoint.reader import verify_file
from hybridpp.checkpoint.remote_path import AnyPath, as_path
from hybridpp.checkpoint.run_contents import chosen_step, open_chosen
from hybridpp.cli.commands.checkpoint import ListArguments, ShowArguments, VerifyArguments
from hybridpp.cli.output import bytes_done, show
from hybridpp.errors import CheckpointError
from hybridpp.sizes import format_bytes
from hybridpp.text_table import TextTable


def run_list(arguments: ListArguments) -> None:
    """Print a line for each checkpoint of the folder."""
    path = as_path(arguments.path)
    show(
        _listed(path, _found(path)),
        "",
        "complete: the manifest is intact, and files have the sizes that it names. hybridpp checkpoint verify reads "
        "them, too.",
    )


def run_verify(arguments: VerifyArguments) -> None:
    """Read the files of one checkpoint, or of all, and print what is intact; the exit code is 1 if one is damaged.

    Raises:
        CheckpointError: there is none.
    """
    path = as_path(arguments.path)
    newest = chosen_step(path, arguments.step)
    chosen = committed_steps(path) if arguments.step is None else [newest]
    rows, problems = _verified(path, chosen)
    show(TextTable(["step", "files", "size", "state"], rows, left=(3,)))
    if problems:
        show("", *problems, "Resume from an intact step, or save again.")
        raise typer.Exit(1)


def run_show(arguments: ShowArguments) -> None:
    """Print what a checkpoint holds.

    Raises:
        CheckpointError: there is none, or it is damaged.
    """
    path = as_path(arguments.path)
    show(*_shown(path, chosen_step(path, arguments.step), arguments.tensors))


def _found(path: AnyPath) -> list[int]:
    """The steps of the checkpoints in a folder."""
    found = steps(path)
    if not found:
        raise CheckpointError(f"{why_no_checkpoint(path)}Pass the folder that booster.save was given.")
    return found


def _listed(path: AnyPath, found: list[int]) -> TextTable:
    rows = []
    for step in found:
        folder = step_folder(path, step)
        if not (folder / MANIFEST).is_file():
            rows.append([str(step), "", "", "", "", "incomplete: its save was killed, or is running"])
            continue
        try:
            manifest = open_step(path, step)
        except CheckpointError as error:
            rows.append([str(step), "", "", "", "", f"damaged: {error}"])
            continue
        files = str(len(manifest.files))
        size, saved = format_bytes(manifest.nbytes), _saved(manifest, folder)
        rows.append([str(step), saved, size, files, _layout(manifest), "complete"])
    return TextTable(["step", "saved", "size", "files", "layout", "state"], rows, left=(1, 4, 5))


def _saved(manifest: Manifest, folder: AnyPath) -> str:
    """When a checkpoint was saved; of one that does not say so, when its manifest was written here."""
    if manifest.saved_at is not None:
        return datetime.fromtimestamp(manifest.saved_at).isoformat(" ", "seconds")
    when = (folder / MANIFEST).stat().st_mtime
    return f"{datetime.fromtimestamp(when).isoformat(' ', 'seconds')}?" if when else ""


def _layout(manifest: Manifest) -> str:
    sizes = {name: manifest.layout.get(f"{name}_size", "?") for name in ("tp", "pp", "dp")}
    return " x ".join(f"{name}={size}" for name, size in sizes.items())


def _verified(path: AnyPath, chosen: list[int]) -> tuple[list[list[str]], list[str]]:
    """The rows of a table, and what is damaged."""
    manifests: dict[int, Manifest | str] = {}
    for step in chosen:
        try:
            manifests[step] = open_step(path, step)
        except CheckpointError as error:
            manifests[step] = str(error)
    rows, problems = [], []
    with bytes_done("verify", sum(one.nbytes for one in manifests.values() if isinstance(one, Manifest))) as read:
        for step, manifest in manifests.items():
            if isinstance(manifest, str):
                found = [manifest]
                rows.append([str(step), "", "", "damaged"])
            else:
                found = _damaged_files(step_folder(path, step), manifest, read)
                state = "damaged" if found else "intact"
                rows.append([str(step), str(len(manifest.files)), format_bytes(manifest.nbytes), state])
            problems += [f"step {step}: {problem}." for problem in found]
    return rows, problems


def _damaged_files(folder: AnyPath, manifest: Manifest, read: Callable[[int], None]) -> list[str]:
    problems = []
    for name in sorted(manifest.files):
        try:
            verify_file(folder, manifest, name)
        except CheckpointError as error:
            problems.append(str(error))
        read(manifest.files[name].nbytes)
    return problems


def _shown(path: AnyPath, step: int, all_tensors: bool) -> list[str | TextTable]:
    manifest = open_chosen(path, step)
    lines: list[str | TextTable] = [
        f"step {step} in {step_folder(path, step)}",
        f"saved by {_layout(manifest)}, zero_stage={manifest.layout.get('zero_stage', 0)}",
        f"{len(manifest.tensors)} tensors, {format_bytes(manifest.nbytes)} in {len(manifest.files)} files",
    ]
    for index, model in enumerate(manifest.state["models"]):
        lines += ["", *_model(manifest, index, model)]
    extras = manifest.state["extras"]
    lines += ["", f"extras: {', '.join(extras) or 'none'}"]
    if all_tensors:
        rows = [
            [
                key,
                entry.dtype,
                "x".join(map(str, entry.shape)) or "scalar",
                format_bytes(entry.nbytes),
                str(len(entry.chunks)),
            ]
            for key, entry in manifest.tensors.items()
        ]
        lines += ["", TextTable(["tensor", "dtype", "shape", "size", "parts"], rows, left=(0, 1))]
    return lines


def _model(manifest: Manifest, index: int, model: dict[str, Any]) -> list[str]:
    weights = [entry for key, entry in manifest.tensors.items() if key.startswith(f"model{index}/weights/")]
    dtypes = Counter(entry.dtype for entry in weights)
    numbers = sum(prod(entry.shape) for entry in weights)
    lines = [
        f"model {index}: {model['class']}",
        f"  {len(weights)} weights and buffers, {numbers:,} numbers: "
        + ", ".join(f"{count} of {dtype}" for dtype, count in dtypes.items()),
    ]
    optimizer = model["optimizer"]
    if optimizer is not None:
        rates = ", ".join(str(group.get("lr")) for group in optimizer["settings"])
        counts = optimizer["counts"]
        lines.append(f"  {optimizer['class'] or 'optimizer'}: {len(optimizer['groups'])} groups, lr {rates}")
        lines.append(f"  {counts['applied']} steps applied, {counts['skipped']} skipped")
    lines.append(f"  LR schedule: {'yes' if model['lr_scheduler'] is not None else 'no'}")
    if model["data"] is not None:
        epoch, samples, *_ = model["data"]
        lines.append(f"  data: epoch {epoch}, {samples} samples of it taken")
    return lines
