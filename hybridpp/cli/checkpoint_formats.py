"""``hybridpp checkpoint export``, ``import``, ``reshard``: checkpoints of runs in other formats and files."""

from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from hybridpp.checkpoint.commit import open_step
from hybridpp.checkpoint.export_run import export_dcp, export_folder, export_torch
from hybridpp.checkpoint.import_run import import_run
from hybridpp.checkpoint.import_sources import open_source
from hybridpp.checkpoint.model_origin import model_shell
from hybridpp.checkpoint.new_output import refuse_existing
from hybridpp.checkpoint.remote_path import as_path
from hybridpp.checkpoint.reshard import reshard
from hybridpp.checkpoint.run_contents import StoredRunModel, chosen_step, open_verified
from hybridpp.cli.argtypes import positive
from hybridpp.errors import ConfigError
from hybridpp.saving import check_run_arguments
from hybridpp.sizes import format_bytes, parse_bytes
from hybridpp.text_table import text_table

_DTYPES = ("as-before", "float32", "bfloat16", "float16", "float64")


def add_arguments(actions: Any) -> None:
    """Declare the subcommands and their flags."""
    export = _action(actions, "export", "write a model of a checkpoint in another format")
    export.add_argument("--to", choices=("hf", "dcp", "torch"), required=True, help="the format")
    export.add_argument("--step", type=int, help="default: the newest")
    export.add_argument("--model", type=int, help="number of the model, if the run had several; the first one is 0")
    export.add_argument(
        "--dtype", choices=_DTYPES, default="as-before", help="of weights; as-before: what they had before boost"
    )
    export.add_argument("--config", type=Path, help="hf: folder with a config.json to use instead of the run's")
    export.add_argument("--size-per-shard", type=positive, default=1024, help="hf: most of a file, in MB")
    other = _action(actions, "import", "make a checkpoint of weights in another format, for booster.resume")
    other.add_argument("--step", type=int, default=0, help="of the checkpoint; default: 0")
    again = _action(actions, "reshard", "write a checkpoint anew, as another number of ranks would have")
    again.add_argument("--step", type=int, help="default: the newest")
    again.add_argument("--ranks", type=positive, default=1, help="number of ranks, of which each has files of its own")
    again.add_argument("--file-size", default="1GiB", help="the most that a file holds")


def _action(actions: Any, name: str, text: str) -> ArgumentParser:
    action: ArgumentParser = actions.add_parser(name, help=text, description=f"{text.capitalize()}.")
    source = "folder or URL that booster.save was given"
    if name == "import":
        source = "folder of transformers or of torch.distributed.checkpoint, or file of torch.save or of safetensors"
    action.add_argument("path", help=source)
    action.add_argument("out", help="what is written; nothing is overwritten")
    return action


def run_export(arguments: Namespace) -> str:
    """Write the export; returns the table.

    Raises:
        HybridppError: the checkpoint is missing or damaged, or the export cannot be written.
    """
    if arguments.config is not None and arguments.to != "hf":
        raise ConfigError(f"--config is for --to hf: got --to {arguments.to}. Leave it out.")
    out = _local(arguments.out, "exports are written to")
    refuse_existing(out)
    with _progress("verify", _size(arguments)) as read:
        folder, manifest = open_verified(as_path(arguments.path), arguments.step, read)
    dtype = None if arguments.dtype == "as-before" else getattr(torch, arguments.dtype)
    model = StoredRunModel(folder, manifest, arguments.model, dtype)
    if arguments.to == "hf":
        shell = model_shell(model.class_name, model.config, arguments.config)
        with _progress("write", sum(spec.nbytes for spec in model.specs.values())) as written:
            export_folder(model, out, shell, f"{arguments.size_per_shard}MB", written)
    else:
        (export_dcp if arguments.to == "dcp" else export_torch)(model, out)
    has_state = arguments.to != "hf" and model.has_optimizer
    row = [str(manifest.step), model.class_name, str(len(model.specs)), "yes" if has_state else "no"]
    return text_table(
        ["step", "model", "tensors", "optimizer", "size", "written to"],
        [[*row, format_bytes(written_bytes(out)), str(out)]],
        left=(1, 3, 5),
    )


def run_import(arguments: Namespace) -> str:
    """Write the checkpoint; returns the table.

    Raises:
        HybridppError: the source cannot be read, or the checkpoint cannot be written.
    """
    check_run_arguments(arguments.step, None)
    source = open_source(_local(arguments.path, "imports are read from"))
    num_bytes = sum(tensor.spec.nbytes for tensor in source.weights.values())
    with _progress("write", num_bytes) as written:
        made = import_run(source, as_path(arguments.out), arguments.step, written)
    state = f"fresh: {source.no_optimizer}"
    if source.groups is not None:
        state = f"of {len(source.state)} parameters in {len(source.groups)} groups"
    rows = [
        ["weights", f"{len(source.weights)} tensors, {format_bytes(num_bytes)}, from {source.kind}"],
        ["optimizer", state],
        *([name, "fresh: not in this format"] for name in ("LR schedule", "position in data", "random generators")),
    ]
    return text_table([f"step {made.step}", str(arguments.out)], rows, left=(0, 1))


def run_reshard(arguments: Namespace) -> str:
    """Write the checkpoint; returns the table.

    Raises:
        HybridppError: the checkpoint is missing or damaged, or the new one cannot be written.
    """
    file_bytes = parse_bytes("--file-size", arguments.file_size)
    with _progress("verify", _size(arguments)) as read:
        folder, manifest = open_verified(as_path(arguments.path), arguments.step, read)
    with _progress("write", sum(entry.nbytes for entry in manifest.tensors.values())) as written:
        made = reshard(folder, manifest, as_path(arguments.out), arguments.ranks, file_bytes, written)
    rows = [
        [where, str(len(one.files)), format_bytes(max((f.nbytes for f in one.files.values()), default=0)), size]
        for where, one in ((str(arguments.path), manifest), (str(arguments.out), made))
        for size in [format_bytes(one.nbytes)]
    ]
    return text_table([f"step {manifest.step}", "files", "largest", "size"], rows)


def _size(arguments: Namespace) -> int:
    path = as_path(arguments.path)
    return open_step(path, chosen_step(path, arguments.step)).nbytes


def _local(path: str, what: str) -> Path:
    found = as_path(path)
    if not isinstance(found, Path):
        raise ConfigError(f"{what} local paths: got {path}. Pass a local path, and copy.")
    return found


def written_bytes(path: Path) -> int:
    """Bytes of a file, or of all files of a folder."""
    return sum(file.stat().st_size for file in (path, *path.rglob("*")) if file.is_file())


@contextmanager
def _progress(what: str, num_bytes: int) -> Iterator[Callable[[int], Any]]:
    """A bar on stderr, if that is a terminal."""
    with tqdm(total=num_bytes, desc=what, unit="B", unit_scale=True, unit_divisor=1024, disable=None) as bar:
        yield bar.update
