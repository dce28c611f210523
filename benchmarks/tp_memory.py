"""The memory of a tensor-parallel rank: weights, gradients, optimizer state; and logits in a step.

    OMP_NUM_THREADS=1 PYTHONPATH=.:plugins python benchmarks/tp_memory.py
    OMP_NUM_THREADS=1 PYTHONPATH=.:plugins python benchmarks/tp_memory.py --searches

Ranks of one process. The first table counts the bytes of the boosted objects after a step of Adam (fp32), on the rank
with the most memory, and the minimum without padding and copies: sharded parameters divided by the number of ranks, and
all others. The second table follows every tensor that a step allocates during its lifetime: Llama with a large
vocabulary and very few layers, so that logits, loss and their gradients make the peak. With ``--searches``, instead:
how much the resident memory of a process grows at most while it searches how blocks of real models are divided over
eight ranks, and how they run on sequence shards, in bf16; each in a process of its own.
"""

import argparse
import functools
import multiprocessing
import time
import warnings
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from hybridpp_plugins.preview_tp import preview_tensor_parallel
from torch import Tensor, nn
from torch.nn import functional
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
)
from vit import make_batch, make_vit

from hybridpp import Booster, HybridParallelPlugin
from hybridpp.cluster import Loopback
from hybridpp.config import ParallelConfig, Precision
from hybridpp.sharded_activations import gathered
from hybridpp.tensor_parallel import sharding_of

MIB = 2**20
LLAMA = {
    "*.q_proj": "column",
    "*.k_proj": "column",
    "*.v_proj": "column",
    "*.o_proj": "row",
    "*.gate_proj": "column",
    "*.up_proj": "column",
    "*.down_proj": "row",
    "*.embed_tokens": "vocab",
    "lm_head": "gathered_column",
}
GPT2 = {
    "*.c_attn": "fused_column:concatenated:3",
    "*.attn.c_proj": "row",
    "*.c_fc": "column",
    "*.mlp.c_proj": "row",
    "*.wte": "vocab",
}
Batch = dict[str, Tensor]
Criterion = Callable[[Any, Any], Tensor]
# What makes a model, a batch, and the plan by which it is divided.
Case = tuple[Callable[[], nn.Module], Batch, dict[str, str] | None]
# A parameter is one, too: what a function makes of its memory is a view.
_PLAIN = (Tensor, nn.Parameter)


def llama(vocab: int, hidden: int, num_layers: int) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_hidden_layers=num_layers,
        num_attention_heads=8,
        num_key_value_heads=4,
        use_cache=False,
    )
    return LlamaForCausalLM(config)


def gpt2() -> GPT2LMHeadModel:
    torch.manual_seed(0)
    config = GPT2Config(
        n_embd=256,
        n_layer=6,
        n_head=8,
        vocab_size=8000,
        n_positions=128,
        use_cache=False,
        bos_token_id=0,
        eos_token_id=0,
        loss_type="ForCausalLMLoss",
    )
    return GPT2LMHeadModel(config)


def tokens(vocab: int, num_samples: int, length: int) -> Batch:
    ids = torch.randint(0, vocab, (num_samples, length), generator=torch.Generator().manual_seed(0))
    return {"input_ids": ids, "labels": ids}


def model_loss(outputs: Any, inputs: Any) -> Tensor:
    return outputs.loss


def boosted(model: nn.Module, batch: Batch, tp_size: int, plan: dict[str, str] | None, criterion: Criterion) -> Any:
    """The step, and what was boosted."""
    plugin = HybridParallelPlugin(
        tp_size=tp_size, pp_size=1, num_microbatches=1, precision="fp32", tensor_parallel_plan=plan
    )
    booster = Booster(plugin=plugin, device="cpu")
    parts = booster.boost(model, torch.optim.Adam(model.parameters()), sample=batch)

    def step() -> None:
        booster.execute_pipeline(iter([batch]), parts.model, criterion, parts.optimizer)

    return step, parts.model, parts.optimizer


def held(make_model: Callable[[], nn.Module], batch: Batch, tp_size: int, plan: dict[str, str] | None) -> list[float]:
    """MiB of weights, gradients and optimizer state of the rank that has most, and of its divided weights."""

    def rank() -> list[float]:
        step, model, optimizer = boosted(make_model(), batch, tp_size, plan, model_loss)
        step()
        weights = list(model.parameters())
        gradients = [weight.grad for weight in weights if weight.grad is not None]
        assert len(gradients) == len(weights)
        optimizer.step()
        state = [leaf for leaf in pytree.tree_leaves(dict(optimizer.state)) if isinstance(leaf, Tensor) and leaf.dim()]
        divided = [weight for weight in weights if sharding_of(weight) is not None]
        return [sum(tensor.nbytes for tensor in tensors) / MIB for tensors in (weights, gradients, state, divided)]

    return [max(column) for column in zip(*Loopback(tp_size).run(rank), strict=True)]


class Live(TorchDispatchMode):
    """Bytes of the tensors that were allocated inside and are alive, and the most there ever were."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        known = {leaf.untyped_storage()._cdata for leaf in pytree.tree_leaves((args, kwargs)) if type(leaf) in _PLAIN}
        result = func(*args, **(kwargs or {}))
        for leaf in pytree.tree_leaves(result):
            if type(leaf) is Tensor and leaf.untyped_storage()._cdata not in known | self._known:
                self._follow(leaf.untyped_storage())
        return result

    def _follow(self, storage: Any) -> None:
        size, place = storage.nbytes(), storage._cdata
        self._known.add(place)
        self.now += size
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._gone, place, size)

    def _gone(self, place: int, size: int) -> None:
        self._known.discard(place)
        self.now -= size


def from_parts(outputs: Any, inputs: Any) -> Tensor:
    """The loss as anyone writes it."""
    logits = outputs.logits[:, :-1].reshape(-1, outputs.logits.shape[-1])
    return functional.cross_entropy(logits, inputs["labels"][:, 1:].reshape(-1))


def from_whole(outputs: Any, inputs: Any) -> Tensor:
    """The same of the whole logits."""
    outputs.logits = gathered(outputs.logits)
    return from_parts(outputs, inputs)


def peak(vocab: int, tp_size: int, criterion: Criterion) -> float:
    """MiB of the rank that has most."""
    batch = tokens(vocab, 4, 128)

    def without_labels(outputs: Any, inputs: Any) -> Tensor:
        return criterion(outputs, batch)

    def rank() -> float:
        only_ids = {"input_ids": batch["input_ids"]}
        step, _, _ = boosted(llama(vocab, 64, 1), only_ids, tp_size, LLAMA if tp_size > 1 else None, without_labels)
        step()
        with Live() as live:
            step()
        return live.peak / MIB

    return max(Loopback(tp_size).run(rank))


# Hidden and inner widths, heads, heads of keys and values.
LARGE = {
    "Llama 8B": (4096, 14336, 32, 8),
    "Llama 70B": (8192, 28672, 64, 8),
    "Llama 405B": (16384, 53248, 128, 8),
    "Mixtral 8x22B": (6144, 16384, 48, 8),
}


def resident_mib(key: str) -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith(key))


def search(name: str, tp_size: int, results: Any) -> None:
    """Put a block's bytes, the growth of resident memory in a search, and the processor time of that (MiB, s)."""
    hidden, inner, heads, kv_heads = LARGE[name]
    is_moe = name.startswith("Mixtral")
    config = (MixtralConfig if is_moe else LlamaConfig)(
        vocab_size=1024,
        hidden_size=hidden,
        intermediate_size=inner,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        num_hidden_layers=1,
    )
    with torch.device("meta"):
        model = (MixtralForCausalLM if is_moe else LlamaForCausalLM)(config).to(torch.bfloat16).eval()
    if is_moe:
        model.set_experts_implementation("batched_mm")
    before, start = resident_mib("VmRSS"), time.process_time()
    Path("/proc/self/clear_refs").write_text("5")
    preview_tensor_parallel(model, ParallelConfig(tp_size=tp_size, enable_sequence_parallelism=True), Precision.BF16)
    block = sum(held.nbytes for held in model.model.layers.parameters()) / MIB
    results.put((block, resident_mib("VmHWM") - before, time.process_time() - start))


def searches() -> None:
    print("| block | tp | in bf16 (MiB) | peak of the search (MiB) | of the block | s of the processor |")
    print("|---|--:|--:|--:|--:|--:|", flush=True)
    context = multiprocessing.get_context("fork")
    for name in LARGE:
        results = context.Queue()
        child = context.Process(target=search, args=(name, 8, results))
        child.start()
        block, peak_mib, seconds = results.get(timeout=600)
        child.join()
        print(f"| {name} | 8 | {block:,.0f} | {peak_mib:,.0f} | {peak_mib / block:.3f} | {seconds:.1f} |", flush=True)


def main() -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--searches", action="store_true", help="the memory of searches, in place of that of ranks")
    if parser.parse_args().searches:
        searches()
        return
    words = tokens(8000, 2, 32)
    models: dict[str, Case] = {
        "ViT, hidden 384, 12 layers": (functools.partial(make_vit, 384), make_batch(2), None),
        "GPT-2, hidden 256, 6 layers, vocabulary 8000": (gpt2, words, GPT2),
        "Llama, hidden 256, 6 layers, vocabulary 8000": (functools.partial(llama, 8000, 256, 6), words, LLAMA),
    }
    print("| model | tp | weights (MiB) | gradients | Adam's state | together | of one process | without filling |")
    print("|---|--:|--:|--:|--:|--:|--:|--:|", flush=True)
    for name, (make_model, batch, plan) in models.items():
        alone = sum(held(make_model, batch, 1, None)[:3])
        for tp_size in (1, 2, 4):
            *parts, divided = held(make_model, batch, tp_size, plan if tp_size > 1 else None)
            # All that is divided has a gradient and two moments.
            share = 4 * divided * tp_size / alone
            exact = share / tp_size + 1 - share
            columns = " | ".join(f"{part:.1f}" for part in (*parts, sum(parts)))
            print(f"| {name} | {tp_size} | {columns} | {sum(parts) / alone:.3f} | {exact:.3f} |", flush=True)
    vocab = 32000
    print(f"\nlogits of 4 x 128 tokens over {vocab}, fp32: {4 * 128 * vocab * 4 / MIB:.1f} MiB\n")
    print("| tp | logits | peak of a step (MiB) |\n|--:|---|--:|", flush=True)
    for tp_size, criterion, what in ((1, from_parts, "whole"), (2, from_whole, "gathered"), (2, from_parts, "parts")):
        print(f"| {tp_size} | {what} | {peak(vocab, tp_size, criterion):.1f} |", flush=True)
    print(f"| 4 | parts | {peak(vocab, 4, from_parts):.1f} |")


if __name__ == "__main__":
    main()
