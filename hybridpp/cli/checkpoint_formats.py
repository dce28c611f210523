"""``hybridpp checkpoint export``, ``import``, ``reshard``: checkpoints of runs in other formats and files."""

from pathlib import Path

import torch

from hybridpp.checkpoint.export_run import export_dcp, export_folder, export_torch
from hybridpp.checkpoint.import_run import import_run
from hybridpp.checkpoint.import_sources import open_source
from hybridpp.checkpoint.model_origin import model_shell
from hybridpp.checkpoint.new_output import refuse_existing
from hybridpp.checkpoint.remote_path import as_path
from hybridpp.checkpoint.reshard import reshard
from hybridpp.checkpoint.run_contents import StoredRunModel, chosen_step, open_chosen, open_verified
from hybridpp.cli.commands.checkpoint import ExportArguments, ImportArguments, ReshardArguments
from hybridpp.cli.output import bytes_done, show
from hybridpp.errors import ConfigError
from hybridpp.saving import check_run_arguments
from hybridpp.sizes import format_bytes, parse_bytes
from hybridpp.text_table import TextTable


def run_export(arguments: ExportArguments) -> None:
    """Write the export, and print what was written.

    Raises:
        HybridppError: the checkpoint is missing or damaged, or the export cannot be written.
    """
    if arguments.config is not None and arguments.to != "hf":
        raise ConfigError(f"--config is for --to hf: got --to {arguments.to}. Leave it out.")
    out = _local(arguments.out, "exports are written to")
    refuse_existing(out)
    with bytes_done("verify", _size(arguments)) as read:
        folder, manifest = open_verified(as_path(arguments.path), arguments.step, read)
    dtype = None if arguments.dtype == "as-before" else getattr(torch, arguments.dtype)
    model = StoredRunModel(folder, manifest, arguments.model, dtype)
    if arguments.to == "hf":
        config = None if arguments.config is None else Path(arguments.config)
        shell = model_shell(model.class_name, model.config, config)
        with bytes_done("write", sum(spec.nbytes for spec in model.specs.values())) as written:
            export_folder(model, out, shell, f"{arguments.size_per_shard}MB", written)
    else:
        (export_dcp if arguments.to == "dcp" else export_torch)(model, out)
    has_state = arguments.to != "hf" and model.has_optimizer
    row = [str(manifest.step), model.class_name, str(len(model.specs)), "yes" if has_state else "no"]
    titles = ["step", "model", "tensors", "optimizer", "size", "written to"]
    show(TextTable(titles, [[*row, format_bytes(written_bytes(out)), str(out)]], left=(1, 3, 5)))


def run_import(arguments: ImportArguments) -> None:
    """Write the checkpoint, and print what was written.

    Raises:
        HybridppError: the source cannot be read, or the checkpoint cannot be written.
    """
    check_run_arguments(arguments.step, None)
    source = open_source(_local(arguments.path, "imports are read from"))
    num_bytes = sum(tensor.spec.nbytes for tensor in source.weights.values())
    with bytes_done("write", num_bytes) as written:
        made = import_run(source, as_path(arguments.out), arguments.step, written)
    state = f"fresh: {source.no_optimizer}"
    if source.groups is not None:
        state = f"of {len(source.state)} parameters in {len(source.groups)} groups"
    rows = [
        ["weights", f"{len(source.weights)} tensors, {format_bytes(num_bytes)}, from {source.kind}"],
        ["optimizer", state],
        *([name, "fresh: not in this format"] for name in ("LR schedule", "position in data", "random generators")),
    ]
    show(TextTable([f"step {made.step}", str(arguments.out)], rows, left=(0, 1)))


def run_reshard(arguments: ReshardArguments) -> None:
    """Write the checkpoint, and print what was written.

    Raises:
        HybridppError: the checkpoint is missing or damaged, or the new one cannot be written.
    """
    file_bytes = parse_bytes("--file-size", arguments.file_size)
    with bytes_done("verify", _size(arguments)) as read:
        folder, manifest = open_verified(as_path(arguments.path), arguments.step, read)
    with bytes_done("write", sum(entry.nbytes for entry in manifest.tensors.values())) as written:
        made = reshard(folder, manifest, as_path(arguments.out), arguments.ranks, file_bytes, written)
    rows = [
        [where, str(len(one.files)), format_bytes(max((f.nbytes for f in one.files.values()), default=0)), size]
        for where, one in ((str(arguments.path), manifest), (str(arguments.out), made))
        for size in [format_bytes(one.nbytes)]
    ]
    show(TextTable([f"step {manifest.step}", "files", "largest", "size"], rows))


def _size(arguments: ExportArguments | ReshardArguments) -> int:
    path = as_path(arguments.path)
    return open_chosen(path, chosen_step(path, arguments.step)).nbytes


def _local(path: str, what: str) -> Path:
    found = as_path(path)
    if not isinstance(found, Path):
        raise ConfigError(f"{what} local paths: got {path}. Pass a local path, and copy.")
    return found


def written_bytes(path: Path) -> int:
    """Bytes of a file, or of all files of a folder."""
    return sum(file.stat().st_size for file in (path, *path.rglob("*")) if file.is_file())
