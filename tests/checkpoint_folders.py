"""Small checkpoints, written without a model."""

import torch

from hybridpp.checkpoint.boxes import Box
from hybridpp.checkpoint.commit import begin, commit, new_save_id, step_folder, token_file
from hybridpp.checkpoint.manifest import Manifest
from hybridpp.checkpoint.writer import Holding, write_holdings

full_holding = Holding.of_all
LAYOUT = {"dp_size": 1, "pp_size": 1, "tp_size": 1}
STATE = {"models": [], "extras": {}, "generators": None, "replicas_of_ranks": [0]}


def halves(key, tensor):
    """The tensor in two parts along its last dimension."""
    width, last = tensor.shape[-1] // 2, tensor.dim() - 1
    boxes = []
    for start, length in ((0, width), (width, tensor.shape[-1] - width)):
        starts = (*[0] * last, start)
        boxes.append(Box(starts, (*tensor.shape[:-1], length)))
    return Holding(key, tensor.dtype, tuple(tensor.shape), [(box, tensor[box.slices]) for box in boxes])


def tensors_of(seed):
    generator = torch.Generator().manual_seed(seed)
    return {f"weights/{n}": torch.randn(6, 4, generator=generator) for n in range(3)}


def save(path, step, seed=0, file_bytes=200, holdings=None):
    """A checkpoint of three tensors in several files; returns its manifest."""
    save_id = new_save_id()
    begin(path, step, save_id)
    folder = step_folder(path, step)
    holdings = [halves(key, tensor) for key, tensor in tensors_of(seed).items()] if holdings is None else holdings
    files, tensors = write_holdings(folder, f"rank-00000.{save_id}", holdings, file_bytes)
    manifest = Manifest(save_id=save_id, step=step, layout=LAYOUT, files=files, tensors=tensors, state=STATE)
    commit(path, manifest)
    token_file(folder, save_id).unlink()
    return manifest
