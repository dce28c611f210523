"""Fine-tune a causal language model on a folder of texts, all of it or an adapter (LoRA), and let it write.

    torchrun --standalone --nproc-per-node 2 examples/lm/train.py --model path/to/llama --dataset path/to/texts --lora

cuts the model into two pipeline stages. The texts are packed into blocks of one length, the loss is a mean over tokens,
not over blocks, and at the end the model goes on with a text. ``--output`` gets a folder that ``from_pretrained`` reads
(with ``--lora``: that peft's does).
"""

import math
from argparse import ArgumentParser, Namespace
from typing import Any

import datasets
import torch
import torch.nn.functional as F
import transformers
from packed_texts import IGNORED, load_texts, pack
from torch import Tensor, nn
from tqdm import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer

from hybridpp import Booster, DistCoordinator, HybridAdam, HybridParallelPlugin, launch_from_torch
from hybridpp.optim import CosineAnnealingWarmupLR


def parse_args() -> Namespace:
    parser = ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", required=True, help="folder or hub id of a causal language model")
    parser.add_argument("--dataset", required=True, help="folder of .txt files, or hub id of a dataset with texts")
    parser.add_argument("--output", default="outputs/lm", help="folder of the result (default: %(default)s)")
    parser.add_argument("--lora", action="store_true", help="train an adapter only (needs peft)")
    parser.add_argument("--length", type=int, default=256, help="tokens of a block (default: %(default)s)")
    parser.add_argument("--prompt", default="The ", help="the text that the model goes on with")
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--batch-size", type=int, default=8, help="blocks per replica (default: %(default)s)")
    parser.add_argument("--lr", type=float, help="peak learning rate; default: 5e-5, with --lora 2e-4")
    parser.add_argument("--precision", choices=("fp32", "bf16", "fp16"), default="fp32")
    parser.add_argument("--tp-size", type=int, default=1)
    parser.add_argument("--pp-size", type=int, help="default: 2 on 2, 4, ... processes, else 1")
    parser.add_argument("--zero-stage", type=int, default=0)
    parser.add_argument("--seed", type=int, default=42)
    return parser.parse_args()


class TokenLoss:
    """The mean over the tokens that count: hybridpp weights micro-batches and replicas by :meth:`num_items`."""

    def __call__(self, outputs: Any, batch: Any) -> Tensor:
        logits, labels = outputs.logits[:, :-1], batch["labels"][:, 1:]
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED)

    def num_items(self, batch: Any) -> Tensor:
        return (batch["labels"][:, 1:] != IGNORED).sum()


def make_plugin(args: Namespace, world_size: int) -> HybridParallelPlugin:
    pp_size = args.pp_size or (2 if world_size % (2 * args.tp_size) == 0 else 1)
    return HybridParallelPlugin(
        tp_size=args.tp_size,
        pp_size=pp_size,
        zero_stage=args.zero_stage,
        num_microbatches=4,
        max_norm=1.0,
        precision=args.precision,
    )


def evaluate(booster: Booster, model: nn.Module, dataloader: Any) -> float:
    """The loss per token of all held-out blocks. Collective: all ranks."""
    model.eval()
    loss_sum = num_tokens = 0.0
    criterion = TokenLoss()
    with torch.no_grad():
        for batch in dataloader:
            weight = float(criterion.num_items(batch))
            loss_sum += weight * booster.execute_pipeline(iter([batch]), model, criterion)["loss"].item()
            num_tokens += weight
    totals = torch.tensor([loss_sum, num_tokens], dtype=torch.float64)
    torch.distributed.all_reduce(totals, group=booster.plugin.dp_group)
    return float(totals[0] / totals[1])


def train(args: Namespace, coordinator: DistCoordinator) -> None:
    """The whole job: load, train, evaluate, save, generate."""
    with coordinator.priority_execution():  # rank 0 downloads and packs, the others find its files
        tokenizer = AutoTokenizer.from_pretrained(args.model)
        model = AutoModelForCausalLM.from_pretrained(args.model, dtype="float32")
        splits = load_texts(args.dataset)
        train_set, held_out = (pack(splits[name], tokenizer, args.length) for name in ("train", "test"))
    plugin = make_plugin(args, coordinator.world_size)
    booster = Booster(plugin=plugin)
    if args.lora:
        from peft import LoraConfig  # noqa: PLC0415  # without --lora, peft need not be there

        model = booster.enable_lora(model, lora_config=LoraConfig(r=8, lora_alpha=16, task_type="CAUSAL_LM"))

    dataloader = plugin.prepare_dataloader(train_set, args.batch_size, shuffle=True, seed=args.seed)
    test_dataloader = plugin.prepare_dataloader(held_out, args.batch_size)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = HybridAdam(trained, lr=args.lr or (2e-4 if args.lora else 5e-5))
    total_steps = args.epochs * len(dataloader)
    lr_scheduler = CosineAnnealingWarmupLR(optimizer, total_steps, warmup_steps=total_steps // 10)
    model, optimizer, criterion, dataloader, lr_scheduler = booster.boost(
        model, optimizer, TokenLoss(), dataloader, lr_scheduler
    )
    num_trained = sum(parameter.numel() for parameter in trained)
    coordinator.print_on_master(
        f"Layout: tp={plugin.tp_size} x pp={plugin.pp_size} x dp={plugin.dp_size}; {num_trained:,} parameters to "
        f"train, {len(train_set)} blocks of {args.length} tokens"
    )

    for epoch in range(args.epochs):
        model.train()
        data_iter = iter(dataloader)
        with tqdm(range(len(dataloader)), f"Epoch [{epoch + 1}]", disable=not coordinator.is_master()) as bar:
            for _ in bar:
                loss = booster.execute_pipeline(data_iter, model, criterion, optimizer)["loss"]
                optimizer.step()
                lr_scheduler.step()
                bar.set_postfix(loss=f"{loss.item():.3f}", refresh=False)
        held_out_loss = evaluate(booster, model, test_dataloader)
        coordinator.print_on_master(
            f"Epoch [{epoch + 1}]: held-out loss {held_out_loss:.3f} per token, perplexity "
            f"{math.exp(held_out_loss):.1f}"
        )

    booster.save_model(model, args.output)  # of an adapted model: the adapter
    if coordinator.is_master():
        tokenizer.save_pretrained(args.output)
    prompt = tokenizer(args.prompt, return_tensors="pt")
    tokens = booster.generate(model, dict(prompt), max_new_tokens=20)  # on every rank
    coordinator.print_on_master(f"The model writes: {tokenizer.decode(tokens[0], skip_special_tokens=True)!r}")


def main() -> None:
    args = parse_args()
    launch_from_torch(seed=args.seed)
    coordinator = DistCoordinator()
    if not coordinator.is_master():
        datasets.disable_progress_bars()
        transformers.utils.logging.disable_progress_bar()
    try:
        train(args, coordinator)
    finally:
        coordinator.destroy()


if __name__ == "__main__":
    main()
