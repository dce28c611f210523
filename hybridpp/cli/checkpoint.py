"""``hybridpp checkpoint``: what ``booster.save`` wrote, without a job and without a device."""

from argparse import ArgumentParser, Namespace
from collections import Counter
from datetime import datetime
from math import prod
from typing import Any

from hybridpp.checkpoint.commit import committed_steps, open_step, step_folder, steps
from hybridpp.checkpoint.folder_kind import other_kind
from hybridpp.checkpoint.manifest import MANIFEST, Manifest
from hybridpp.checkpoint.reader import verify_file
from hybridpp.checkpoint.remote_path import AnyPath, as_path
from hybridpp.cli import checkpoint_formats
from hybridpp.errors import CheckpointError
from hybridpp.sizes import format_bytes
from hybridpp.text_table import text_table

_FORMATS = {
    "export": checkpoint_formats.run_export,
    "import": checkpoint_formats.run_import,
    "reshard": checkpoint_formats.run_reshard,
}


def add_arguments(parser: ArgumentParser) -> None:
    """Declare the flags."""
    actions = parser.add_subparsers(dest="action", metavar="action", required=True)
    for name, text in (
        ("list", "what a folder of checkpoints holds"),
        ("verify", "read every file, and compare it with its digest"),
        ("show", "what a checkpoint holds"),
    ):
        action = actions.add_parser(name, help=text, description=f"{text.capitalize()}.")
        action.add_argument("path", help="folder or URL that booster.save was given")
        if name != "list":
            action.add_argument(
                "--step", type=int, help="default: " + ("every step" if name == "verify" else "the newest")
            )
        if name == "show":
            action.add_argument("--tensors", action="store_true", help="list every tensor")
    checkpoint_formats.add_arguments(actions)


def run(arguments: Namespace) -> str:
    """Returns the table.

    Raises:
        HybridppError: there is no checkpoint, one is damaged, or something cannot be written.
    """
    if arguments.action in _FORMATS:
        return _FORMATS[arguments.action](arguments)
    path: AnyPath = as_path(arguments.path)
    found = steps(path)
    if not found:
        raise CheckpointError(
            f"{path} holds no checkpoint. {other_kind(path)}Pass the folder that booster.save was given."
        )
    if arguments.action == "list":
        return _listed(path, found)
    if arguments.step is not None and arguments.step not in committed_steps(path):
        raise CheckpointError(f"{path} holds no checkpoint of step {arguments.step}. It holds {committed_steps(path)}.")
    chosen = committed_steps(path) if arguments.step is None else [arguments.step]
    if arguments.action == "verify":
        return _verified(path, chosen)
    if not chosen:
        raise CheckpointError(f"{path} holds no complete checkpoint, only what killed saves left.")
    return _shown(path, chosen[0], arguments.tensors)


def _listed(path: AnyPath, found: list[int]) -> str:
    rows = []
    for step in found:
        folder = step_folder(path, step)
        if not (folder / MANIFEST).is_file():
            rows.append([str(step), "", "", "", "", "incomplete: its save was killed, or is running"])
            continue
        when = (folder / MANIFEST).stat().st_mtime
        saved = datetime.fromtimestamp(when).isoformat(" ", "seconds") if when else ""
        try:
            manifest = open_step(path, step)
        except CheckpointError as error:
            rows.append([str(step), saved, "", "", "", f"damaged: {error}"])
            continue
        files = str(len(manifest.files))
        rows.append([str(step), saved, format_bytes(manifest.nbytes), files, _layout(manifest), "complete"])
    return text_table(["step", "saved", "size", "files", "layout", "state"], rows, left=(1, 4, 5))


def _layout(manifest: Manifest) -> str:
    sizes = {name: manifest.layout.get(f"{name}_size", "?") for name in ("tp", "pp", "dp")}
    return " x ".join(f"{name}={size}" for name, size in sizes.items())


def _verified(path: AnyPath, chosen: list[int]) -> str:
    rows, damaged = [], []
    for step in chosen:
        try:
            manifest = open_step(path, step)
        except CheckpointError as error:
            damaged.append(f"step {step}: {error}")
            continue
        problems = []
        for name in sorted(manifest.files):
            try:
                verify_file(step_folder(path, step), manifest, name)
            except CheckpointError as error:
                problems.append(f"step {step}: {error}")
        damaged += problems
        rows.append([str(step), str(len(manifest.files)), format_bytes(manifest.nbytes), "intact"])
    if damaged:
        raise CheckpointError(f"{path} holds damaged checkpoints. {'; '.join(damaged)}.")
    return text_table(["step", "files", "size", "state"], rows, left=(3,))


def _shown(path: AnyPath, step: int, all_tensors: bool) -> str:
    manifest = open_step(path, step)
    lines = [
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
        lines += ["", text_table(["tensor", "dtype", "shape", "size", "parts"], rows, left=(0, 1))]
    return "\n".join(lines)


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
