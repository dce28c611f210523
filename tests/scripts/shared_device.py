"""Five steps in each precision, on ranks that share one CUDA device; prints the mean losses. Run under torchrun."""

import argparse

import torch
from support import image_batch, model_loss, replica_part, sgd, tiny_vit

from hybridpp import Booster, DistCoordinator, HybridParallelPlugin, launch_from_torch

parser = argparse.ArgumentParser()
parser.add_argument("--pp-size", type=int)
parser.add_argument("--tp-size", type=int, default=1)
parser.add_argument("--precisions", nargs="+")
parser.add_argument("--schedule", default="1f1b")
parser.add_argument("--zero-stage", type=int, default=0)
parser.add_argument("--device", default="cuda")
args = parser.parse_args()

launch_from_torch(backend="gloo")
# cuDNN would round fp32 to TF32.
torch.backends.cudnn.allow_tf32 = False
coordinator = DistCoordinator()
for precision in args.precisions:
    settings = {"num_microbatches": 2, "precision": precision, "schedule": args.schedule, "zero_stage": args.zero_stage}
    plugin = HybridParallelPlugin(tp_size=args.tp_size, pp_size=args.pp_size, **settings)
    booster = Booster(plugin=plugin, device=args.device)
    model = tiny_vit()
    model, optimizer, *_ = booster.boost(model, sgd(model.parameters()), sample=image_batch(2))
    data = iter([replica_part(image_batch(8, seed), plugin.layout.here.dp, plugin.dp_size) for seed in range(5)])
    losses = []
    for _ in range(5):
        loss = booster.execute_pipeline(data, model, model_loss, optimizer)["loss"]
        optimizer.step()
        losses.append(torch.cat(plugin.layout.control.all_gather(loss.cpu().reshape(1))).mean().item())
    coordinator.print_on_master(" ".join([precision, *map(str, losses)]))
coordinator.destroy()
