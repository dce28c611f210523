"""Peak host memory of replicas that boost a model on the meta device, load it and train it, by stage of ZeRO.

    OMP_NUM_THREADS=1 PYTHONPATH=.:plugins python benchmarks/zero_memory.py

A Llama of random weights (142 million parameters) is read from one file by each replica. A process reports how much its
peak resident memory (``ru_maxrss``) exceeds what was resident after the imports and the launch: behind boost and
``load_model``, and behind the second step of AdamW. The bytes foretold are those of docs/memory.md, without activations
and without the mapped file, whose pages count in what is resident while it is read; "anonymous" is without them.
"tensors" are those that operators make, followed one by one: the rest is modules, threads, the allocator's.
"a while" adds what a step takes for a while, by docs/memory.md: the larger of a pass and an update.
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
from estimate_memory import resizes_followed
from host_memory import AnonymousPeak, peak_mib, resident_mib
from transformers import LlamaConfig, LlamaForCausalLM

from hybridpp import Booster, HybridParallelPlugin, launch_from_torch
from hybridpp.estimate import AllocationLog

MIB = 2**20
REPLICAS = 2
LARGEST = 16000 * 1024  # the embedding, which fills a bucket
BUCKET_MIB = 28.0  # the others: a gate, an up and a q projection, say


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
    passing = 4 * (LARGEST + 2 * BUCKET_MIB * MIB / 4) if zero_stage == 2 else 0  # three open buckets
    return loaded / MIB, (loaded + num_elements * 8 / shards + passing) / MIB


def briefly_mib(precision: str, zero_stage: int) -> float:
    """What a step takes for a while: in a pass a gradient and sums under way, in the update torch's AdamW."""
    size, other = 4 * LARGEST / MIB, BUCKET_MIB
    gradient = size if precision == "fp32" else size / 2
    under_way = {0: 0.0, 1: size / 2 + 3 * other / 2, 2: size / 2 + other / 2}[zero_stage]
    return max(gradient + under_way, 2 * size / (REPLICAS if zero_stage else 1))


def measure(folder: str, precision: str, zero_stage: int) -> list[float]:
    """Peaks over the baseline in MiB, of all pages, anonymous ones and tensors, behind loading and behind training."""
    launch_from_torch(seed=0)
    ids = torch.arange(16).reshape(2, 8)
    batch = {"input_ids": ids, "labels": ids}
    before, anonymous = resident_mib(), AnonymousPeak()
    with AllocationLog() as log, resizes_followed([log]):
        with torch.device("meta"):
            model = LlamaForCausalLM(config())
        plugin = HybridParallelPlugin(precision=precision, zero_stage=zero_stage)  # type: ignore[arg-type]  # from text
        booster = Booster(plugin=plugin)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
        parts = booster.boost(model, optimizer, lambda outputs, inputs: outputs.loss, sample=batch)
        booster.load_model(parts.model, Path(folder))
        peaks = [peak_mib() - before, anonymous.grown_mib(), log.peak / MIB]
        for _ in range(2):
            booster.execute_pipeline(iter([batch]), parts.model, parts.criterion, parts.optimizer)
            assert parts.optimizer is not None
            parts.optimizer.step()
        peaks += [peak_mib() - before, anonymous.grown_mib(), log.peak / MIB]
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
    names = "pages (MiB) | anonymous | tensors | foretold"
    print(f"| precision | `zero_stage` | loaded: {names} | trained: {names} | a while |\n|---{'|--:' * 10}|")
    with tempfile.TemporaryDirectory() as folder:
        torch.manual_seed(0)
        LlamaForCausalLM(config()).save_pretrained(folder, max_shard_size="100MB")
        for precision in ("fp32", "bf16"):
            for stage in (0, 1, 2):
                command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
                command += [str(REPLICAS), __file__, "--rank", folder, precision, str(stage)]
                job = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
                *peaks, num_elements = json.loads(job.stdout.splitlines()[-1])
                loaded, trained = foretold_mib(num_elements, precision, stage)
                briefly = trained + briefly_mib(precision, stage)
                cells = [f"{peak:.0f} ({peak / loaded - 1:+.0%})" for peak in peaks[:3]] + [f"{loaded:.0f}"]
                cells += [f"{peak:.0f} ({peak / briefly - 1:+.0%})" for peak in peaks[3:]]
                cells += [f"{trained:.0f}", f"{briefly:.0f}"]
                print(f"| {precision} | {stage} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
