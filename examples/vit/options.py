"""Command line of the ViT example."""

from argparse import ArgumentParser, Namespace
from collections.abc import Sequence


def parse_args(arguments: Sequence[str] | None = None) -> Namespace:
    """The flags of ``train.py``; sizes that depend on the number of processes are ``None`` if left out."""
    parser = ArgumentParser(description="Train or fine-tune a Vision Transformer with tensor and pipeline parallelism.")
    add_task_flags(parser)
    add_training_flags(parser)
    add_parallel_flags(parser)
    args = parser.parse_args(arguments)
    fine_tuning = args.model is not None
    if args.epochs is None:
        args.epochs = 3 if fine_tuning else 25
    if args.lr is None:
        args.lr = 5e-5 if fine_tuning else 2e-3
    if args.num_microbatches is None and args.microbatch_size is None:
        args.num_microbatches = 4
    _check_plugin(parser, args)
    return args


def _check_plugin(parser: ArgumentParser, args: Namespace) -> None:
    """Resolve the name of a preset, and refuse flags that its plugin has no use for."""
    if args.plugin == "torch_ddp_fp16":
        if args.precision not in (None, "fp16"):
            parser.error("--plugin torch_ddp_fp16 is torch_ddp with --precision fp16: leave --precision out")
        args.plugin, args.precision = "torch_ddp", "fp16"
    if args.plugin == "hybrid_parallel":
        args.zero_stage = args.zero_stage or 0
        return
    for flag in ("tp_size", "pp_size", "zero_stage"):
        if getattr(args, flag) is not None:
            parser.error(f"--{flag.replace('_', '-')} is of --plugin hybrid_parallel: leave it out with {args.plugin}")


def add_task_flags(parser: ArgumentParser) -> None:
    group = parser.add_argument_group("task")
    group.add_argument("--model", help="hub id or folder of a model to fine-tune (default: a small ViT from scratch)")
    group.add_argument("--dataset", default="digits", help="digits, a folder of images by class, or a hub id")
    group.add_argument("--max-samples", type=int, help="use at most this many samples of each split")
    group.add_argument("--output", default="outputs/vit", help="folder for the trained model (default: %(default)s)")
    group.add_argument("--record", help="record the last epoch's steps in this folder, for `hybridpp report`")
    group.add_argument("--timeline", help="draw what each rank did in one step to this .svg, .png or .pdf file")


def add_training_flags(parser: ArgumentParser) -> None:
    group = parser.add_argument_group("training")
    group.add_argument("--epochs", type=int, help="default: 25 from scratch, 3 with --model")
    group.add_argument("--batch-size", type=int, default=64, help="per data-parallel replica (default: %(default)s)")
    group.add_argument("--lr", type=float, help="peak learning rate; default: 2e-3 from scratch, 5e-5 with --model")
    group.add_argument("--weight-decay", type=float, default=0.05, help="default: %(default)s")
    group.add_argument("--warmup-ratio", type=float, default=0.1, help="share of all steps (default: %(default)s)")
    group.add_argument("--max-norm", type=float, default=1.0, help="gradient clipping (default: %(default)s)")
    group.add_argument("--precision", choices=("fp32", "bf16", "fp16"), help="default: the plugin's, mostly fp32")
    group.add_argument("--save-every", type=int, metavar="N", help="write a checkpoint of the run every N steps")
    group.add_argument("--resume", action="store_true", help="go on from the newest checkpoint, if there is one")
    group.add_argument("--seed", type=int, default=42, help="default: %(default)s")


def add_parallel_flags(parser: ArgumentParser) -> None:
    group = parser.add_argument_group("parallelism", "The processes that these leave over hold replicas of the model.")
    group.add_argument(
        "--plugin",
        default="hybrid_parallel",
        help="torch_ddp, torch_ddp_fp16, low_level_zero, gemini, torch_fsdp, hybrid_parallel, or the entry point of "
        "another package (default: %(default)s)",
    )
    group.add_argument(
        "--tp-size", type=int, help="ranks that share a layer (default: 2 on 4, 8, ... processes, else 1)"
    )
    group.add_argument("--pp-size", type=int, help="pipeline stages (default: 2 on 2, 4, ... processes, else 1)")
    group.add_argument("--zero-stage", type=int, help="replicas divide 1: optimizer state, 2: gradients, 3: weights")
    sizes = group.add_mutually_exclusive_group()
    sizes.add_argument("--num-microbatches", type=int, help="microbatches per batch (default: 4)")
    sizes.add_argument("--microbatch-size", type=int, help="samples per microbatch, instead of --num-microbatches")
