"""A job in which the last rank alone raises in the middle of a step; run under torchrun by a test."""

import time

from support import image_batch, model_loss, tiny_vit
from torch.optim import SGD

from hybridpp import Booster, DistCoordinator, HybridParallelPlugin, launch_from_torch

launch_from_torch(backend="gloo")
coordinator = DistCoordinator()
model = tiny_vit()
plugin = HybridParallelPlugin(tp_size=1, pp_size=2, num_microbatches=2, precision="fp32")
booster = Booster(plugin=plugin, device="cpu")
model, optimizer, *_ = booster.boost(model, SGD(model.parameters(), lr=0.1), sample=image_batch(2))


def criterion(outputs, inputs):
    if coordinator.rank == coordinator.world_size - 1:
        print("raises at", time.monotonic(), flush=True)
        raise RuntimeError("the criterion broke")
    return model_loss(outputs, inputs)


booster.execute_pipeline(iter([image_batch(4)]), model, criterion, optimizer)
