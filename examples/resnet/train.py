"""Train a residual network, given as a sequence of its parts, with the Trainer and the interleaved schedule.

    torchrun --standalone --nproc-per-node 4 examples/resnet/train.py

trains on handwritten digits in two pipeline stages of two chunks each, on two replicas, and logs the accuracy after
every epoch. It may be stopped and started again with ``--resume``, also with another number of processes.
"""

from argparse import ArgumentParser, Namespace

import torch
from resnet import build_model
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import TensorDataset, random_split

from hybridpp import Booster, DistCoordinator, HybridParallelPlugin, get_dist_logger, launch_from_torch
from hybridpp.optim import LinearWarmupLR
from hybridpp.trainer import Hook, Trainer, hooks

NUM_CLASSES = 10


def parse_args() -> Namespace:
    parser = ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--batch-size", type=int, default=32, help="per replica (default: %(default)s)")
    parser.add_argument("--lr", type=float, default=2e-3, help="peak learning rate (default: %(default)s)")
    parser.add_argument("--num-blocks", type=int, default=2, help="of each of the three layers (default: %(default)s)")
    parser.add_argument("--max-samples", type=int, help="use at most this many images")
    parser.add_argument("--pp-size", type=int, help="pipeline stages (default: 2 on 2, 4, ... processes, else 1)")
    parser.add_argument("--num-chunks", type=int, default=2, help="stages per process; 1: 1F1B (default: %(default)s)")
    parser.add_argument("--num-microbatches", type=int, default=4, help="of a batch (default: %(default)s)")
    parser.add_argument("--output", default="outputs/resnet", help="folder of checkpoints (default: %(default)s)")
    parser.add_argument("--resume", action="store_true", help="go on from the newest checkpoint, if there is one")
    parser.add_argument("--tracker", help="tensorboard, wandb, ...: where losses and accuracies go, beside the log")
    parser.add_argument("--seed", type=int, default=42)
    return parser.parse_args()


def load_images(max_samples: int | None, seed: int) -> tuple[torch.utils.data.Dataset, torch.utils.data.Dataset]:
    """Digits to train on, and a fifth of them held out: pairs of an image ``[1, 8, 8]`` and its label."""
    raw = load_digits()
    images = torch.tensor(raw.images, dtype=torch.float32).unsqueeze(1) / 8 - 1
    digits = TensorDataset(images[:max_samples], torch.tensor(raw.target)[:max_samples])
    train_set, held_out = random_split(digits, (0.8, 0.2), torch.Generator().manual_seed(seed))
    return train_set, held_out


def make_plugin(args: Namespace, world_size: int) -> HybridParallelPlugin:
    """Two stages where the processes are even in number; ranks that the pipeline leaves over hold replicas."""
    pp_size = args.pp_size or (1 if world_size % 2 else 2)
    return HybridParallelPlugin(
        pp_size=pp_size,
        num_microbatches=args.num_microbatches,
        num_model_chunks=args.num_chunks if pp_size > 1 else 1,  # more than one: the interleaved schedule
    )


def train(args: Namespace) -> dict[str, float]:
    """The whole job; returns the last value of each metric."""
    coordinator = DistCoordinator()
    train_set, held_out = load_images(args.max_samples, args.seed)
    model = build_model(NUM_CLASSES, args.num_blocks)

    plugin = make_plugin(args, coordinator.world_size)
    train_dataloader = plugin.prepare_dataloader(train_set, batch_size=args.batch_size, shuffle=True, seed=args.seed)
    test_dataloader = plugin.prepare_dataloader(held_out, batch_size=args.batch_size)
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr)
    lr_scheduler = LinearWarmupLR(optimizer, args.epochs, warmup_steps=1)
    criterion: nn.Module = nn.CrossEntropyLoss()

    booster = Booster(plugin=plugin)
    parts = booster.boost(model, optimizer, criterion, train_dataloader, lr_scheduler)
    coordinator.print_on_master(
        f"Layout: pp={plugin.pp_size} x dp={plugin.dp_size}, stages per process: "
        f"{args.num_chunks if plugin.pp_size > 1 else 1}; {len(train_set)} images to train on, {len(held_out)} held out"
    )

    logger = get_dist_logger()
    hook_list: list[Hook] = [
        hooks.AccuracyHook(),
        hooks.LRSchedulerHook(by_epoch=True),
        hooks.LogMetricByEpochHook(logger),
        hooks.LogTimingByEpochHook(logger),
        hooks.SaveCheckpointHook(f"{args.output}/checkpoints", keep_last=2),
    ]
    if args.tracker:
        hook_list.append(hooks.TrackerHook(args.tracker, "resnet", args.output, config=vars(args)))
    trainer = Trainer(booster, parts)
    trainer.fit(
        epochs=args.epochs,
        test_dataloader=test_dataloader,
        hooks=hook_list,
        display_progress=True,
        resume_from=f"{args.output}/checkpoints" if args.resume else None,
    )
    booster.save_model(parts.model, f"{args.output}/model.safetensors")
    return trainer.metrics


def predict(model: nn.Module, images: Tensor) -> Tensor:
    """The classes of images, by a model that :func:`build_model` made and that was given the saved weights."""
    with torch.no_grad():
        predicted: Tensor = model.eval()(images).argmax(-1)
    return predicted


def main() -> None:
    args = parse_args()
    launch_from_torch(seed=args.seed)
    coordinator = DistCoordinator()
    try:
        metrics = train(args)
        coordinator.print_on_master(f"Held-out accuracy: {metrics['test/accuracy']:.2%}")
    finally:
        coordinator.destroy()


if __name__ == "__main__":
    main()
