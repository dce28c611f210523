"""The loop that users of such systems learn, with this library's imports; run under torchrun by a test.

Names, settings and the order of calls are the tutorial's: a criterion, a plugin with fp16 and one
sample per micro-batch, a training function without zero_grad, a progress bar on the last stage. An argument is another
precision.
"""

import sys

import torch
import torch.distributed as dist
from support import IMAGE, tiny_vit
from tqdm import tqdm

from hybridpp import (
    Booster,
    CosineAnnealingWarmupLR,
    DistCoordinator,
    HybridAdam,
    HybridParallelPlugin,
    disable_existing_loggers,
    get_dist_logger,
    launch_from_torch,
)

SEED, LEARNING_RATE, WEIGHT_DECAY, NUM_EPOCH, WARMUP_RATIO = 42, 1e-3, 0.0, 6, 0.3
TP_SIZE, PP_SIZE = 2, 2

disable_existing_loggers()
launch_from_torch(config={}, seed=SEED)
coordinator = DistCoordinator()
world_size = coordinator.world_size
logger = get_dist_logger()

model = tiny_vit()
images = torch.randn(12, 3, IMAGE, IMAGE)
dataset = [{"pixel_values": image, "labels": number % 5} for number, image in enumerate(images)]

plugin = HybridParallelPlugin(
    tp_size=TP_SIZE,
    pp_size=PP_SIZE,
    num_microbatches=None,
    microbatch_size=1,
    enable_all_optimization=True,
    precision=sys.argv[1] if sys.argv[1:] else "fp16",
    initial_scale=1,
)
booster = Booster(plugin=plugin, device="cpu")
train_dataloader = plugin.prepare_dataloader(dataset, batch_size=4, shuffle=True)
optimizer = HybridAdam(model.parameters(), lr=(LEARNING_RATE * world_size), weight_decay=WEIGHT_DECAY)
total_steps = len(train_dataloader) * NUM_EPOCH
lr_scheduler = CosineAnnealingWarmupLR(
    optimizer=optimizer, total_steps=total_steps, warmup_steps=int(WARMUP_RATIO * total_steps)
)


def criterion(outputs, inputs):
    return outputs.loss


model, optimizer, _criterion, train_dataloader, lr_scheduler = booster.boost(
    model=model, optimizer=optimizer, criterion=criterion, dataloader=train_dataloader, lr_scheduler=lr_scheduler
)


def run_forward_backward(model, optimizer, criterion, data_iter, booster):
    output_dict = booster.execute_pipeline(
        data_iter, model, criterion, optimizer, return_loss=True, return_outputs=True
    )
    return output_dict["loss"], output_dict["outputs"]


def train_epoch(epoch, model, optimizer, criterion, lr_scheduler, dataloader, booster, coordinator):
    num_steps = len(dataloader)
    data_iter = iter(dataloader)
    enable_pbar = coordinator.is_master()
    if isinstance(booster.plugin, HybridParallelPlugin) and booster.plugin.pp_size > 1:
        tp_rank = dist.get_rank(booster.plugin.tp_group)
        dp_rank = dist.get_rank(booster.plugin.dp_group)
        enable_pbar = tp_rank == 0 and dp_rank == 0 and booster.plugin.stage_manager.is_last_stage()
    model.train()

    with tqdm(range(num_steps), desc=f"Epoch [{epoch + 1}]", disable=not enable_pbar) as pbar:
        for _ in pbar:
            loss, _ = run_forward_backward(model, optimizer, criterion, data_iter, booster)
            optimizer.step()
            lr_scheduler.step()
            if enable_pbar:
                pbar.set_postfix({"loss": loss.item()})
                print(loss.item())


for epoch in range(NUM_EPOCH):
    train_epoch(epoch, model, optimizer, _criterion, lr_scheduler, train_dataloader, booster, coordinator)
coordinator.destroy()
