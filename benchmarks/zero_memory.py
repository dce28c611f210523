"""Peak host memory of replicas that boost a model on the meta device, load it and train it, by stage of ZeRO.

    OMP_NUM_THREADS=1 PYTHONPATH=.:plugins python benchmarks/zero_memory.py

A Llama of random weights (142 million parameters) is read from one file by each replica. A process reports how much its
peak resident memory (``ru_maxrss``) exceeds what was resident after the imports and the launch: behind boost and
``load_model``, and behind the second step of AdamW. The bytes foretold are those of docs/memory.md, without activations
and without the mapped file, whose pages count in what is resident while it is read; "anonymous" is without them.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path

import torch
from host_memory import AnonymousPeak, peak_mib, resident_mib
from transformers import LlamaConfig, LlamaForCausalLM

from hybridpp import Booster, HybridParallelPlugin, launch_from_torch

MIB = 2**20
REPLICAS = 2
LARGEST = 16000 * 1024  # the embedding, which fills a bucket


def config() -> LlamaConfig:
    return LlamaConfig(
        vocab_size=16000,
        hidden_size=1024,
        intermediate_size=3072,
        num_hidden_layers=8,
        num_attention_heads=16,
        num_key_value_heads=16,
        tie_word_embeddings=False,
    )


def foretold_mib(num_elements: int, precision: str, zero_stage: int) -> tuple[float, float]:
    """Before the first step, which makes the moments, and behind it."""
    shards = REPLICAS if zero_stage else 1
    weight, master = (4, 0) if precision == "fp32" else (2, 4)
    gradient = 4 / (REPLICAS if zero_stage == 2 else 1)
    loaded = num_elements * (weight + gradient + master / shards)
    passing = 12 * LARGEST if zero_stage == 2 else 0
    return loaded / MIB, (loaded + num_elements * 8 / shards + passing) / MIB


def measure(folder: str, precision: str, zero_stage: int) -> list[float]:
    """Peaks over the baseline in MiB, of all pages and of anonymous ones, behind loading and behind training."""
    launch_from_torch(seed=0)
    ids = torch.arange(16).reshape(2, 8)
    batch = {"input_ids": ids, "labels": ids}
    before, anonymous = resident_mib(), AnonymousPeak()
    with torch.device("meta"):
        model = LlamaForCausalLM(config())
    plugin = HybridParallelPlugin(precision=precision, zero_stage=zero_stage)  # type: ignore[arg-type]  # from text
    booster = Booster(plugin=plugin)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    parts = booster.boost(model, optimizer, lambda outputs, inputs: outputs.loss, sample=batch)
    booster.load_model(parts.model, Path(folder))
    peaks = [peak_mib() - before, anonymous.grown_mib()]
    for _ in range(2):
        booster.execute_pipeline(iter([batch]), parts.model, parts.criterion, parts.optimizer)
        assert parts.optimizer is not None
        parts.optimizer.step()
    peaks += [peak_mib() - before, anonymous.grown_mib()]
    return [*peaks, sum(parameter.numel() for parameter in parts.model.parameters())]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rank", nargs=3, metavar=("FOLDER", "PRECISION", "STAGE"), help="one rank's part of a row")
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    if args.rank:
        folder, precision, stage = args.rank
        found = measure(folder, precision, int(stage))
        if os.environ["RANK"] == "0":
            print(json.dumps(found))
        return
    print(
        "| precision | `zero_stage` | loaded (MiB) | anonymous | foretold | trained (MiB) | anonymous | foretold |\n"
        "|---|--:|--:|--:|--:|--:|--:|--:|"
    )
    with tempfile.TemporaryDirectory() as folder:
        torch.manual_seed(0)
        LlamaForCausalLM(config()).save_pretrained(folder, max_shard_size="100MB")
        for precision in ("fp32", "bf16"):
            for stage in (0, 1, 2):
                command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
                command += [str(REPLICAS), __file__, "--rank", folder, precision, str(stage)]
                job = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
                *peaks, num_elements = json.loads(job.stdout.splitlines()[-1])
                cells = [
                    f"{most:.0f} ({most / expected - 1:+.0%}) | {own:.0f} ({own / expected - 1:+.0%}) | {expected:.0f}"
                    for most, own, expected in zip(
                        peaks[::2], peaks[1::2], foretold_mib(num_elements, precision, stage), strict=True
                    )
                ]
                print(f"| {precision} | {stage} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
