"""A job whose rank 1 dies at the place named on the command line; run by a test that stands for torchrun.

Rank 0 prints the loss of each step.
"""

import os
import sys

from support import image_batch, model_loss, sgd, tiny_vit

from hybridpp import Booster, DistCoordinator, HybridParallelPlugin, launch_from_torch

_, dies = sys.argv
os.environ["MASTER_PORT"] = os.environ["AGENT_PORT"]
attempt = os.environ["TORCHELASTIC_RESTART_COUNT"]


def reach(place):
    if place == dies and coordinator.rank == 1:
        os._exit(3)


launch_from_torch(backend="gloo", timeout_s=60)
coordinator = DistCoordinator()
reach("launched")
plugin = HybridParallelPlugin(tp_size=1, pp_size=2, num_microbatches=2, precision="fp32")
reach("plugin")
booster, model = Booster(plugin=plugin, device="cpu"), tiny_vit(num_layers=2)
model, optimizer, *_ = booster.boost(model, sgd(model.parameters()), sample=image_batch(2))
reach("boosted")
for step in range(3):
    loss = booster.execute_pipeline(iter([image_batch(4, step)]), model, model_loss, optimizer)["loss"]
    coordinator.print_on_master(f"attempt {attempt} loss {loss.item()}")
    optimizer.step()
    reach("step")
coordinator.destroy()
