"""Held-out accuracy of the ViT example: of the model in the pipeline, and of its saved folder in plain transformers."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import transformers
from data import ImageSplits
from model import load_processor
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import AutoModelForImageClassification

from hybridpp import Booster

# Of 10,000 predictions, how many may change when the same weights run in fp32 and in batches of another size.
TOLERATED_CHANGES = {"fp32": 1, "bf16": 200, "fp16": 200}


class Score(NamedTuple):
    """How many of the images were recognised."""

    num_correct: int
    num_images: int

    def __str__(self) -> str:
        return f"{self.num_correct / self.num_images:.2%} ({self.num_correct} of {self.num_images})"


def evaluate(
    model: nn.Module, criterion: Callable[[Any, Any], Tensor], dataloader: DataLoader[Any], booster: Booster
) -> Score | None:
    """Score of the model that is being trained, over all replicas; None: the job was told to stop.

    Collective: every rank must call it. All of them get the score.
    """
    model.eval()
    counts = torch.zeros(2, dtype=torch.long, device=next(model.parameters()).device)
    with torch.no_grad():
        for batch in dataloader:
            outputs = booster.execute_pipeline(iter([batch]), model, criterion, return_outputs=True)["outputs"]
            if outputs is not None:  # only the last stage of each pipeline has them
                counts += count_correct(outputs.logits, batch["labels"])
            if booster.interrupted:  # on every rank after the same batch
                return None
    dist.all_reduce(counts)
    counts //= booster.plugin.tp_size  # ranks that share layers have the same outputs
    return Score(*counts.tolist())


def evaluate_folder(folder: str, splits: ImageSplits, batch_size: int) -> Score:
    """Score of a saved model, by one process and without hybridpp: what anyone who gets the folder would write."""
    transformers.utils.logging.disable_progress_bar()
    device = torch.device("cuda") if torch.cuda.is_available() else torch.device("cpu")
    model = AutoModelForImageClassification.from_pretrained(folder).to(device).eval()
    _, held_out = splits.with_processor(load_processor(folder))
    counts = torch.zeros(2, dtype=torch.long, device=device)
    with torch.no_grad():
        for batch in DataLoader(held_out, batch_size=batch_size):
            logits = model(pixel_values=batch["pixel_values"].to(device, model.dtype)).logits
            counts += count_correct(logits, batch["labels"])
    return Score(*counts.tolist())


def count_correct(logits: Tensor, labels: Tensor) -> Tensor:
    """Number of right predictions and number of predictions, for logits of shape ``[B, classes]``."""
    num_correct = (logits.argmax(dim=-1) == labels.to(logits.device)).sum()
    return torch.stack([num_correct, torch.full_like(num_correct, len(labels))])


def check_same(parallel: Score, reloaded: Score, folder: str, precision: str) -> str:
    """A line that sets the two scores side by side.

    Raises:
        RuntimeError: they differ by more than the precision explains.
    """
    # A last batch with fewer images than replicas is filled up with images that were counted before.
    num_repeated = parallel.num_images - reloaded.num_images
    tolerated = reloaded.num_images * TOLERATED_CHANGES[precision] // 10_000 + num_repeated
    difference = abs(parallel.num_correct - reloaded.num_correct)
    line = f"Held-out accuracy: {parallel} in the pipeline, {reloaded} reloaded from {folder} by plain transformers"
    if difference > tolerated:
        raise RuntimeError(f"the saved model is not the trained one: {line}.")
    if parallel == reloaded:
        return f"{line}: the same."
    repeated = f" and {num_repeated} repeated images" if num_repeated else ""
    return f"{line}: {difference} apart, within {precision} rounding{repeated}."
