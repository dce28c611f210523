"""Estimated against measured memory: the bytes of all tensors that a rank holds, at the peak of a step.

    OMP_NUM_THREADS=1 PYTHONPATH=.:plugins python benchmarks/estimate_memory.py

Ranks of one process train models of random weights. From before boost on, every tensor of a rank is followed
as long as it lives: weights, buckets of gradients, masters, optimizer state, activations, messages. The peak of
the third step is compared with the estimate, for every place of the pipeline; the table has the worst of a layout.
"""

import argparse
import gc
import statistics
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    ViTConfig,
    ViTForImageClassification,
)

from hybridpp import Booster, HybridAdam, HybridParallelPlugin
from hybridpp.cluster import Loopback
from hybridpp.config import Precision
from hybridpp.estimate import DEVICES, AllocationLog, EstimateInput, JobSizes

MIB = 2**20
MICROBATCH, LENGTH = 2, 64
Batch = dict[str, Tensor]


class Case(NamedTuple):
    """A layout: ranks, micro-batches, keywords of the plugin."""

    ranks: int
    num_microbatches: int
    settings: dict[str, Any]


LAYOUTS = (
    Case(1, 2, {}),
    Case(2, 4, {"pp_size": 2}),
    Case(4, 8, {"pp_size": 4}),
    Case(2, 4, {"pp_size": 2, "schedule": "gpipe"}),
    Case(2, 4, {"pp_size": 2, "schedule": "interleaved"}),
    Case(2, 4, {"pp_size": 2, "schedule": "zb-h1"}),
    Case(2, 4, {"pp_size": 2, "schedule": "zb-v"}),
    Case(2, 4, {"pp_size": 2, "precision": "bf16", "gradient_checkpoint_config": {}}),
    Case(2, 2, {"tp_size": 2}),
    Case(2, 2, {"tp_size": 2, "enable_sequence_parallelism": True}),
    Case(4, 4, {"tp_size": 2, "pp_size": 2, "precision": "bf16"}),
    Case(2, 2, {"precision": "bf16", "zero_stage": 1}),
    Case(2, 2, {"zero_stage": 2}),
    Case(2, 2, {"zero_stage": 3}),
)


def llama() -> nn.Module:
    config = LlamaConfig(
        vocab_size=2000,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=8,
        num_attention_heads=8,
        num_key_value_heads=4,
        use_cache=False,
    )
    return LlamaForCausalLM(config)


def gpt2() -> nn.Module:
    config = GPT2Config(
        n_embd=128,
        n_layer=8,
        n_head=8,
        vocab_size=2000,
        n_positions=LENGTH,
        use_cache=False,
        bos_token_id=0,
        eos_token_id=0,
        loss_type="ForCausalLMLoss",
    )
    return GPT2LMHeadModel(config)


def vit() -> nn.Module:
    config = ViTConfig(
        hidden_size=128,
        num_hidden_layers=8,
        num_attention_heads=4,
        intermediate_size=512,
        image_size=64,
        patch_size=8,
        num_labels=10,
    )
    return ViTForImageClassification(config)


def tokens(num_samples: int) -> Batch:
    ids = torch.full((num_samples, LENGTH), 3)
    return {"input_ids": ids, "labels": ids}


def images(num_samples: int) -> Batch:
    return {"pixel_values": torch.zeros(num_samples, 3, 64, 64), "labels": torch.zeros(num_samples, dtype=torch.long)}


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[int], Batch]]] = {
    "Llama": (llama, tokens),
    "GPT-2": (gpt2, tokens),
    "ViT": (vit, images),
}


def on_meta(make: Callable[[], nn.Module]) -> nn.Module:
    with torch.device("meta"):
        return make().train()


def estimated(make: Callable[[], nn.Module], case: Case) -> list[int]:
    """Bytes of a rank at each place of the pipeline."""
    settings = dict(case.settings)
    given = EstimateInput(
        precision=Precision(settings.pop("precision", "fp32")), device=DEVICES["cpu"], sequence_length=LENGTH
    )
    sizes = JobSizes(world_size=case.ranks, microbatch_size=MICROBATCH, num_microbatches=case.num_microbatches)
    estimator = HybridParallelPlugin.layout_estimator(on_meta(make), given)
    # HybridAdam, which is measured, takes nothing for a while in its update; torch's Adam on a CPU would.
    return [rank.total - rank.update for rank in estimator.estimate(sizes, settings).ranks]


def measured(make: Callable[[], nn.Module], batch_of: Callable[[int], Batch], case: Case) -> list[int]:
    """The same, of tensors that were followed in a step."""
    batch = batch_of(MICROBATCH * case.num_microbatches)
    logs: list[AllocationLog] = []

    def rank() -> int:
        with AllocationLog() as log:
            logs.append(log)
            model = on_meta(make)
            plugin = HybridParallelPlugin(num_microbatches=case.num_microbatches, **case.settings)
            booster = Booster(plugin=plugin, device="cpu")
            optimizer = HybridAdam(model.parameters(), lr=1e-4)
            parts = booster.boost(model, optimizer, lambda outputs, inputs: outputs.loss, sample=batch_of(MICROBATCH))
            booster.init_model(parts.model)
            for step in range(3):
                if step == 2:
                    gc.collect()
                    log.peak = log.now
                booster.execute_pipeline(iter([batch]), parts.model, parts.criterion, parts.optimizer)
                assert parts.optimizer is not None
                parts.optimizer.step()
        return log.peak

    with resizes_followed(logs):
        peaks = Loopback(case.ranks).run(rank)
    tp_size = case.settings.get("tp_size", 1)
    return [peaks[place * tp_size] for place in range(case.settings.get("pp_size", 1))]


class resizes_followed:
    """A context in which the logs follow storages that are freed and allocated again (ZeRO): no operator shows it."""

    def __init__(self, logs: list[AllocationLog]):
        self._logs, self._own = logs, torch.UntypedStorage.resize_

    def __enter__(self) -> None:
        own, logs = self._own, self._logs

        def resize(storage: torch.UntypedStorage, size: int) -> Any:
            for log in logs:
                log.resized(storage, size)
            return own(storage, size)

        torch.UntypedStorage.resize_ = resize  # type: ignore[method-assign, assignment]

    def __exit__(self, *_: Any) -> None:
        torch.UntypedStorage.resize_ = self._own  # type: ignore[method-assign]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--layouts", type=int, nargs="+", default=range(len(LAYOUTS)), help="numbers, from 0")
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    print("| model | layout | ranks | measured (MiB) | estimated | off by |\n|---|---|--:|--:|--:|--:|", flush=True)
    errors = []
    for name in args.models:
        make, batch_of = MODELS[name]
        for number in args.layouts:
            case = LAYOUTS[number]
            pairs = list(zip(measured(make, batch_of, case), estimated(make, case), strict=True))
            real, guess = max(pairs, key=lambda pair: abs(pair[1] / pair[0] - 1))
            errors.append(guess / real - 1)
            layout = ", ".join(f"{key}={value}" for key, value in case.settings.items()) or "one rank"
            cells = f"{real / MIB:.1f} | {guess / MIB:.1f} | {100 * errors[-1]:+.1f} %"
            print(f"| {name} | {layout} | {case.ranks} | {cells} |", flush=True)
    print(f"\nworst: {100 * max(map(abs, errors)):.1f} %, median {100 * statistics.median(map(abs, errors)):.1f} %")


if __name__ == "__main__":
    main()
