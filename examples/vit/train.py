"""Train a Vision Transformer with tensor and pipeline parallelism.

    torchrun --standalone --nproc-per-node 4 examples/vit/train.py

trains a small ViT on handwritten digits, in two pipeline stages whose layers two ranks share, saves it as a Hugging
Face folder, and checks that in plain transformers. With ``--model`` and ``--dataset`` the same script fine-tunes.
"""

import time
from argparse import Namespace
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import datasets
import transformers
from data import ImageSplits, load_splits
from evaluation import check_same, evaluate, evaluate_folder
from model import build_model
from options import parse_args
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader
from tqdm import tqdm

from hybridpp import (
    Booster,
    DistCoordinator,
    HybridAdam,
    Plugin,
    launch_from_torch,
)
from hybridpp.optim import CosineAnnealingWarmupLR
from hybridpp.plugin import Resumed
from hybridpp.timeline import draw

NUM_RECORDED_STEPS = 20


def train(args: Namespace, coordinator: DistCoordinator) -> None:
    """The whole job: load, train, evaluate after every epoch, save, check."""
    started = time.perf_counter()
    with coordinator.priority_execution():  # rank 0 downloads, the others find its files
        splits = load_splits(args.dataset, args.max_samples)
        model, processor = build_model(args.model, splits.label_names)
    train_set, held_out = splits.with_processor(processor)

    plugin = make_plugin(args, coordinator.world_size)
    booster = Booster(plugin=plugin)
    coordinator.print_on_master(describe(args, plugin, model, splits))
    dataloader = plugin.prepare_dataloader(train_set, batch_size=args.batch_size, shuffle=True, seed=args.seed)
    held_out_loader = plugin.prepare_dataloader(held_out, batch_size=args.batch_size)

    optimizer = HybridAdam(model.parameters(), lr=args.lr, weight_decay=args.weight_decay)
    total_steps = args.epochs * len(dataloader)
    lr_scheduler = CosineAnnealingWarmupLR(
        optimizer, total_steps=total_steps, warmup_steps=int(args.warmup_ratio * total_steps)
    )
    model, optimizer, criterion, dataloader, lr_scheduler = booster.boost(
        model=model, optimizer=optimizer, criterion=model_loss, dataloader=dataloader, lr_scheduler=lr_scheduler
    )

    checkpoints = Path(args.output, "checkpoints")
    done = booster.resume(checkpoints, missing="fresh") if args.resume else Resumed()
    if args.resume:
        coordinator.print_on_master(f"Resumed at step {done.step}: epoch {done.epoch + 1}, batch {done.batches + 1}")
    step = done.step

    def after_step() -> None:
        nonlocal step
        step += 1
        if args.save_every and step % args.save_every == 0 and not booster.interrupted:
            booster.save(checkpoints, step=step, keep_last=2)

    def stop() -> None:
        booster.save(checkpoints, step=step, keep_last=2)
        coordinator.print_on_master(f"Stopped after step {step}. Go on with --resume.")

    if args.record is not None and done.epoch == args.epochs:
        coordinator.print_on_master(f"Nothing is left to train, so nothing is recorded in {args.record}.")
    score = None
    for epoch in range(done.epoch, args.epochs):
        first_batch = done.batches if epoch == done.epoch else 0
        is_recorded = args.record is not None and epoch + 1 == args.epochs
        with booster.record_timeline(model) if is_recorded else nullcontext() as recording:
            train_epoch(
                epoch,
                first_batch,
                after_step,
                model,
                optimizer,
                criterion,
                lr_scheduler,
                dataloader,
                booster,
                coordinator,
            )
        if recording is not None:
            recording.save(args.record)
        score = None if booster.interrupted else evaluate(model, criterion, held_out_loader, booster)
        if score is None:  # a signal told the job to stop
            return stop()
        coordinator.print_on_master(f"Epoch [{epoch + 1}]: held-out accuracy {score}")

    if score is None:  # the checkpoint was the end of the run
        score = evaluate(model, criterion, held_out_loader, booster)
        if score is None:
            return stop()
    if args.timeline:
        draw_step(args.timeline, model, optimizer, criterion, dataloader, booster, coordinator)
    booster.save_model(model, args.output, shard=True)
    if coordinator.is_master():
        processor.save_pretrained(args.output)
        reloaded = evaluate_folder(args.output, splits, args.batch_size)
        print(check_same(score, reloaded, args.output, plugin.precision))
    coordinator.block_all()
    coordinator.print_on_master(f"Done in {time.perf_counter() - started:.0f} s.")


def train_epoch(
    epoch: int,
    first_batch: int,
    after_step: Callable[[], None],
    model: nn.Module,
    optimizer: Optimizer,
    criterion: Callable[[Any, Any], Tensor],
    lr_scheduler: LRScheduler,
    dataloader: DataLoader[Any],
    booster: Booster,
    coordinator: DistCoordinator,
) -> None:
    """One pass over the training data, or what is left of it after ``first_batch`` batches.

    Collective: every rank must call it.
    """
    model.train()
    data_iter = iter(dataloader)
    batches = range(first_batch, len(dataloader))
    with tqdm(batches, desc=f"Epoch [{epoch + 1}]", disable=not coordinator.is_master()) as bar:
        for _ in bar:
            loss = booster.execute_pipeline(data_iter, model, criterion, optimizer, return_loss=True)["loss"]
            optimizer.step()
            lr_scheduler.step()
            optimizer.zero_grad()
            after_step()
            if booster.interrupted:  # on every rank after the same step
                break
            bar.set_postfix(loss=f"{loss.item():.3f}", refresh=False)


def draw_step(
    path: str,
    model: nn.Module,
    optimizer: Optimizer,
    criterion: Callable[[Any, Any], Tensor],
    dataloader: DataLoader[Any],
    booster: Booster,
    coordinator: DistCoordinator,
) -> None:
    """Run some more steps without updating the weights, and draw the fastest: the one that other work disturbed least.

    Collective: every rank must call it.
    """
    model.train()
    timelines = []
    for _, batch in zip(range(NUM_RECORDED_STEPS), dataloader, strict=False):
        with booster.record_timeline(model) as recording:
            booster.execute_pipeline(iter([batch]), model, criterion, optimizer)
        optimizer.zero_grad()
        timelines.append(recording.timeline)
    if coordinator.is_master():
        draw(min(timelines, key=lambda timeline: timeline.makespan_ms), path)


def model_loss(outputs: Any, inputs: Any) -> Tensor:
    """The loss of one micro-batch: transformers' models compute it themselves when they are given labels."""
    loss: Tensor = outputs.loss
    return loss


def make_plugin(args: Namespace, world_size: int) -> Any:
    """The plugin that the flags ask for; ranks that its layout leaves over hold replicas."""
    settings: dict[str, Any] = {
        "num_microbatches": args.num_microbatches,
        "microbatch_size": args.microbatch_size,
        "max_norm": args.max_norm,
    }
    if args.precision is not None:
        settings["precision"] = args.precision
    if args.plugin == "hybrid_parallel":
        tp_size, pp_size = choose_sizes(args.tp_size, args.pp_size, world_size)
        settings |= {"tp_size": tp_size, "pp_size": pp_size, "zero_stage": args.zero_stage}
    return Plugin.from_name(args.plugin, **settings)


def choose_sizes(tp_size: int | None, pp_size: int | None, world_size: int) -> tuple[int, int]:
    """Two stages on an even number of ranks; of two ranks each, on a multiple of four. What is given stays."""
    if tp_size is None:
        tp_size = 1 if world_size % 4 or world_size % (2 * (pp_size or 2)) else 2
    if pp_size is None:
        pp_size = 1 if world_size % (2 * tp_size) else 2
    return tp_size, pp_size


def describe(args: Namespace, plugin: Any, model: nn.Module, splits: ImageSplits) -> str:
    """What is about to run, in a few lines."""
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    return (
        f"Layout: tp={plugin.tp_size} x pp={plugin.pp_size} x dp={plugin.dp_size}, zero_stage={plugin.zero_stage}, "
        f"{plugin.precision}\n"
        f"Model: {args.model or 'a small ViT from scratch'}, {num_parameters:,} parameters\n"
        f"Data: {args.dataset}, {len(splits.label_names)} classes, "
        f"{len(splits.train):,} images to train on, {len(splits.held_out):,} held out"
    )


def main() -> None:
    args = parse_args()
    launch_from_torch(seed=args.seed)
    coordinator = DistCoordinator()
    if not coordinator.is_master():  # one set of messages and progress bars is enough
        datasets.disable_progress_bars()
        transformers.utils.logging.disable_progress_bar()
        transformers.utils.logging.set_verbosity_error()
    try:
        train(args, coordinator)
    finally:
        coordinator.destroy()


if __name__ == "__main__":
    main()
