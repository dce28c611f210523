"""The memory that a rank saves in a forward for its backward pass, with and without sequence parallelism.

    OMP_NUM_THREADS=1 PYTHONPATH=.:plugins python benchmarks/sequence_memory.py

Ranks of one process; the rank with the most memory, in fp32 and training mode, without dropout. Counted is every
storage that autograd saves (``saved_tensors_hooks``), once, except weights. With recomputation, it is what the forward
has allocated and still holds when the loss is computed, which is mostly the inputs of the blocks.
"""

import functools
import warnings
from collections.abc import Callable
from typing import Any

import torch
from tensor_parallel import PLAN as VIT
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from tp_memory import LLAMA, MIB, Batch, Case, Live, llama, tokens
from vit import make_batch, make_vit

from hybridpp import Booster, HybridParallelPlugin
from hybridpp.cluster import Loopback

# Without the ends, whose logits would be most of what is kept.
BLOCKS = {name: style for name, style in LLAMA.items() if "." in name and "embed" not in name}


def places(model: nn.Module) -> set[int]:
    """Where a model's own tensors are."""
    return {held.untyped_storage()._cdata for held in (*model.parameters(), *model.buffers())}


class Allocated(Live):
    """What was allocated inside and is alive, but for a model's own tensors, of which layers make views."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self._known |= places(model)

    @property
    def mib(self) -> float:
        return self.now / MIB


class Saved(saved_tensors_hooks):
    """Bytes of what autograd saves inside, but for a model's own tensors."""

    def __init__(self, model: nn.Module):
        own = places(model)
        # The storages themselves, so that none is used twice.
        self._storages: dict[int, Any] = {}

        def pack(tensor: Tensor) -> Tensor:
            storage = tensor.untyped_storage()
            if storage._cdata not in own:
                self._storages[storage._cdata] = storage
            return tensor

        super().__init__(pack, lambda tensor: tensor)

    @property
    def mib(self) -> float:
        return sum(storage.nbytes() for storage in self._storages.values()) / MIB


def kept(
    make_model: Callable[[], nn.Module], batch: Batch, plan: dict[str, str] | None, **settings: Any
) -> tuple[float, float]:
    """MiB that autograd saves; and of what is there when the loss is computed, if blocks are recomputed."""

    def rank(recompute: bool) -> float:
        found: list[float] = []
        options: dict[str, Any] = {"gradient_checkpoint_config": {}} if recompute else {}
        plugin = HybridParallelPlugin(
            pp_size=1, num_microbatches=1, precision="fp32", tensor_parallel_plan=plan, **settings, **options
        )
        booster = Booster(plugin=plugin, device="cpu")
        model = make_model()
        parts = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.0), sample=batch)

        measure = Allocated(parts.model) if recompute else Saved(parts.model)

        def look(*_: Any) -> None:
            found.append(measure.mib)

        def criterion(outputs: Any, inputs: Any) -> Tensor:
            look()
            return outputs.loss

        parts.model.register_forward_pre_hook(look)
        with measure:
            booster.execute_pipeline(iter([batch]), parts.model, criterion, parts.optimizer)
        before, after = found
        return after - before

    size = settings["tp_size"]
    saved, recomputed = (max(Loopback(size).run(functools.partial(rank, flag))) for flag in (False, True))
    return saved, recomputed


def main() -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    words, make_llama = tokens(64, 2, 128), functools.partial(llama, 64, 256, 6)
    models: dict[str, Case] = {
        "ViT, hidden 256, 6 layers, 4 x 65 tokens": (functools.partial(make_vit, 256, 6), make_batch(4), VIT),
        "Llama, hidden 256, 6 layers, 2 x 128 tokens": (make_llama, words, BLOCKS),
    }
    print("| model | tp | sequences | kept (MiB) | of one process | recomputing (MiB) | of one process |")
    print("|---|--:|---|--:|--:|--:|--:|", flush=True)
    for name, (make_model, batch, plan) in models.items():
        alone = kept(make_model, batch, None, tp_size=1)
        print(f"| {name} | 1 | whole | {alone[0]:.1f} | | {alone[1]:.1f} | |", flush=True)
        for size in (2, 4):
            for shards in (False, True):
                found = kept(make_model, batch, plan, tp_size=size, enable_sequence_parallelism=shards)
                cells = " | ".join(f"{mib:.1f} | {mib / one:.3f}" for mib, one in zip(found, alone, strict=True))
                print(f"| {name} | {size} | {'shards' if shards else 'whole'} | {cells} |", flush=True)


if __name__ == "__main__":
    main()
