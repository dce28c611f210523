r"""Every layout loads what every other one saved: 9 layouts, 81 pairs, of a Llama and of a GPT-2.

    OMP_NUM_THREADS=1 PYTHONPATH=.:plugins python benchmarks/reshard_pairs.py

The Llama has one head of keys and values, of which ranks that share layers hold copies, and a vocabulary that is
padded; the GPT-2 has its queries, keys and values in one fused layer. Both have six blocks, and one weight for
embedding and head. One process trains for two steps and saves; each layout resumes from that and saves it, and resumes
from what each has saved and saves it again. A pair is right if

- what is saved again is the first checkpoint: weights, buffers and moments of AdamW, bit for bit, once gathered;
- the loss of the next step is that of every other source, bit for bit.

All ranks are threads of this process. The exit status is the number of models with a pair that is wrong.
"""

import argparse
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from hybridpp import Booster, HybridParallelPlugin
from hybridpp.checkpoint.commit import open_step, step_folder
from hybridpp.checkpoint.run_contents import full_tensor
from hybridpp.cluster import Loopback
from hybridpp.text_table import text_table

STEP, BATCH, VOCABULARY = 2, 12, 37
SMALL_BUCKETS = {"ddp_bucket_cap_mb": 0.01}
LAYOUTS: dict[str, dict[str, Any]] = {
    "1": {},
    "pp2": {"pp_size": 2},
    "pp4 uneven": {"pp_size": 4, "layers_per_stage": [1, 2, 2, 1], "schedule": "zb-h1"},
    "tp2": {"tp_size": 2},
    "tp2 pp2": {"tp_size": 2, "pp_size": 2},
    "dp2 zero 1": {"dp_size": 2, "zero_stage": 1, **SMALL_BUCKETS},
    "dp3 zero 1": {"dp_size": 3, "zero_stage": 1, **SMALL_BUCKETS},
    "pp2 dp2 zero 2": {"pp_size": 2, "dp_size": 2, "zero_stage": 2, **SMALL_BUCKETS},
    "dp2 zero 3": {"dp_size": 2, "zero_stage": 3, **SMALL_BUCKETS},
}
LLAMA_PLAN = {
    **dict.fromkeys(["*.q_proj", "*.k_proj", "*.v_proj", "*.gate_proj", "*.up_proj"], "column"),
    **dict.fromkeys(["*.o_proj", "*.down_proj"], "row"),
    "*.embed_tokens": "vocab",
}
GPT2_PLAN = {
    "*.c_attn": "fused_column:concatenated:3",
    "*.attn.c_proj": "row",
    "*.c_fc": "column",
    "*.mlp.c_proj": "row",
    "*.wte": "vocab",
}


def llama() -> nn.Module:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 6, "vocab_size": VOCABULARY}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 1}
    config: Any = LlamaConfig(**sizes, **heads, use_cache=False, tie_word_embeddings=True)
    return LlamaForCausalLM(config).train()


def gpt2() -> nn.Module:
    torch.manual_seed(0)
    dropout = dict.fromkeys(["resid_pdrop", "embd_pdrop", "attn_pdrop"], 0.0)
    config = GPT2Config(
        n_embd=32, n_layer=6, n_head=4, vocab_size=VOCABULARY, n_positions=8, use_cache=False, **dropout
    )
    return GPT2LMHeadModel(config).train()


MODELS = {"Llama": (llama, LLAMA_PLAN), "GPT-2": (gpt2, GPT2_PLAN)}


class Run:
    """A script, on one rank."""

    def __init__(self, make_model: Callable[[], nn.Module], plan: dict[str, str], settings: dict[str, Any]):
        settings = {name: value for name, value in settings.items() if name != "dp_size"}
        if settings.get("tp_size", 1) > 1:
            settings["tensor_parallel_plan"] = plan
        self.plugin = HybridParallelPlugin(num_microbatches=2, precision="fp32", **settings)
        self.booster, model = Booster(plugin=self.plugin), make_model()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        parts = self.booster.boost(model, optimizer, lambda out, _: out.loss, sample=self.batch(0, 2))
        self.model, self.optimizer, self.criterion = parts.model, parts.optimizer, parts.criterion

    @staticmethod
    def batch(number: int, num_samples: int = BATCH) -> dict[str, Tensor]:
        ids = torch.randint(0, VOCABULARY, (num_samples, 6), generator=torch.Generator().manual_seed(number))
        return {"input_ids": ids, "labels": ids}

    def step(self, number: int) -> str:
        """The loss, to the bit."""
        size, here = BATCH // self.plugin.dp_size, self.plugin.layout.here.dp
        own = {name: value[here * size : (here + 1) * size] for name, value in self.batch(number).items()}
        result = self.booster.execute_pipeline(iter([own]), self.model, self.criterion, self.optimizer)
        self.optimizer.step()
        return float(result["loss"]).hex()


def on_layout(settings: dict[str, Any], run: Callable[[], Any]) -> list[Any]:
    num_ranks = settings.get("tp_size", 1) * settings.get("pp_size", 1) * settings.get("dp_size", 1)
    return Loopback(num_ranks).run(run)


def gathered(path: Path) -> dict[str, Tensor]:
    manifest = open_step(path, STEP)
    return {key: full_tensor(step_folder(path, STEP), manifest, key) for key in manifest.tensors}


def are_equal(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(
        tensor.dtype == other[key].dtype and torch.equal(tensor, other[key]) for key, tensor in one.items()
    )


def save_first(make_model: Callable[[], nn.Module], plan: dict[str, str], folder: Path) -> None:
    run = Run(make_model, plan, {})
    for number in range(STEP):
        run.step(number)
    run.booster.save(folder / "first", step=STEP)


def save_again(make: Callable[[], Run], source: Path, target: Path) -> str:
    """Resume from one folder and save to another; the loss of the next step."""
    run = make()
    run.booster.resume(source)
    run.booster.save(target, step=STEP)
    return run.step(STEP)


def wrong_pairs(make_model: Callable[[], nn.Module], plan: dict[str, str], folder: Path) -> list[list[str]]:
    """Rows of the table of pairs: what each target makes of each source."""
    on_layout({}, lambda: save_first(make_model, plan, folder))
    expected, found = gathered(folder / "first"), {}
    for name, settings in LAYOUTS.items():
        on_layout(
            settings,
            lambda: save_again(lambda: Run(make_model, plan, settings), folder / "first", folder / name),  # noqa: B023
        )
        found[name] = gathered(folder / name)
    rows = []
    for target, settings in LAYOUTS.items():

        def load_all(settings: dict[str, Any] = settings, target: str = target) -> list[str]:
            run = Run(make_model, plan, settings)
            return [save_again(lambda: run, folder / source, folder / f"{source} to {target}") for source in LAYOUTS]

        losses = on_layout(settings, load_all)
        row = [target]
        for number, source in enumerate(LAYOUTS):
            again = gathered(folder / f"{source} to {target}")
            is_state = are_equal(found[source], expected) and are_equal(again, expected)
            is_loss = all(of_rank[number] == of_rank[0] for of_rank in losses)
            row.append("equal" if is_state and is_loss else "loss differs" if is_state else "state differs")
        rows.append(row)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    args = parser.parse_args()
    num_wrong = 0
    for name in args.models:
        start = time.process_time()
        with tempfile.TemporaryDirectory() as folder:
            rows = wrong_pairs(*MODELS[name], Path(folder))
        results = [cell for row in rows for cell in row[1:]]
        print(text_table(["to \\ from", *LAYOUTS], rows))
        print(
            f"{name}: {results.count('equal')} of {len(results)} pairs are equal, bit for bit "
            f"({time.process_time() - start:.0f} s of the processor)",
            flush=True,
        )
        num_wrong += results.count("equal") < len(results)
    sys.exit(num_wrong)


if __name__ == "__main__":
    main()
