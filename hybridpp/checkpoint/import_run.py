"""Write a model of another format as a checkpoint that a run can be resumed from."""

import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from torch import Tensor

from hybridpp.checkpoint.boxes import Box, full_box, split_box
from hybridpp.checkpoint.commit import new_save_id
from hybridpp.checkpoint.import_sources import ImportSource, LazyTensor
from hybridpp.checkpoint.manifest import Manifest
from hybridpp.checkpoint.plain_values import encode
from hybridpp.checkpoint.remote_path import AnyPath
from hybridpp.checkpoint.reshard import write_checkpoint
from hybridpp.checkpoint.safetensors_file import StoredSpec
from hybridpp.checkpoint.writer import FILE_BYTES, WritablePart

# Of an optimizer's state; see hybridpp_plugins/optimizer_by_name.py.
_LIKE, _FULL, _VALUE = "like", "full", "value"
_NO_SETTINGS = ("params", "fused", "foreach", "capturable", "differentiable")


def import_run(
    source: ImportSource, out: AnyPath, step: int, on_written: Callable[[int], Any] | None = None
) -> Manifest:
    """Write a checkpoint of weights and, if the source has it, of an optimizer; the rest of a run begins anew.

    Args:
        source: what is imported.
        out: a folder of checkpoints, which has none of this step.
        step: of the checkpoint.
        on_written: called with the number of bytes of the tensors in each file, after it.

    Raises:
        CheckpointError: ``out`` has a checkpoint of this step or cannot be written; the source is broken.
        ConfigError: the state of the optimizer holds an object.
    """
    parts = [
        part for name, (spec, load) in source.weights.items() for part in _parts(f"model0/weights/{name}", spec, load)
    ]
    described: dict[str, Any] | None = None
    if source.groups is not None:
        state = {name: dict(_entries(source, name, parts)) for name in source.state}
        described = {
            "class": None,
            "settings": [
                {k: encode(v, f"param_groups[{n}][{k!r}]") for k, v in group.items() if k not in _NO_SETTINGS}
                for n, group in enumerate(source.groups)
            ],
            "groups": [{"names": group["params"]} for group in source.groups],
            "state": state,
            "counts": {"applied": _applied(source), "skipped": 0, "last_skipped": False},
            "loss_scale": None,
        }
    model = {
        "class": source.class_name,
        "imported_from": source.kind,
        "progress": {},
        "extra_state": {},
        "optimizer": described,
        "lr_scheduler": None,
        "data": None,
        "origin": source.origin,
    }
    manifest = Manifest(
        save_id=new_save_id(),
        step=step,
        layout={"dp_size": 1, "pp_size": 1, "tp_size": 1, "zero_stage": 0},
        files={},
        tensors={},
        state={"models": [model], "extras": {}, "generators": None, "replicas_of_ranks": [0]},
        saved_at=int(time.time()),
    )
    return write_checkpoint(manifest, [parts], out, FILE_BYTES, on_written)


def _entries(source: ImportSource, name: str, parts: list[WritablePart]) -> Iterator[tuple[str, list[Any]]]:
    """How the state of a parameter is described; its tensors are added to ``parts``."""
    (weight, _) = source.weights[name]
    for key, value in source.state[name].items():
        if not isinstance(value, LazyTensor):
            yield key, [_VALUE, encode(value, f"state[{name!r}][{key!r}]")]
            continue
        spec, load = value
        if not spec.shape and weight.shape:
            yield key, [_VALUE, encode(load(), f"state[{name!r}][{key!r}]")]
            continue
        parts += _parts(f"model0/optimizer/{name}/{key}", spec, load)
        yield key, [_LIKE if spec.shape == weight.shape else _FULL]


def _applied(source: ImportSource) -> int:
    """Steps of the optimizer so far, as far as its state says."""
    found = [entries["step"] for entries in source.state.values() if "step" in entries]
    values = [value.load() if isinstance(value, LazyTensor) else value for value in found[:1]]
    return int(values[0]) if values else 0


def _parts(key: str, spec: StoredSpec, load: Callable[[], Tensor]) -> Iterator[WritablePart]:
    for number, box in enumerate(split_box(full_box(spec.shape), FILE_BYTES // spec.dtype.itemsize)):
        yield WritablePart(key, spec, box, f"{key}#{number}", partial(_cut, load, box))


def _cut(load: Callable[[], Tensor], box: Box) -> Tensor:
    return load()[box.slices]
