"""Runs that are saved and resumed, in any layout, and everything that they consist of."""

import torch
from plugins.zero_models import TiedModel, batches, two_groups
from support import replica_part
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from hybridpp import Booster, HybridParallelPlugin
from hybridpp.checkpoint.commit import open_step, step_folder
from hybridpp.checkpoint.reader import fill, plan_reads
from hybridpp.checkpoint.writer import Holding
from hybridpp.cluster import Loopback

PLAN = {"blocks.*.up": "column", "blocks.*.down": "row", "embed": "vocab", "head": "gathered_column"}
BATCH = 12


def unpredictable(logits, tokens):
    """A loss that stays large: the targets are other random tokens."""
    return nn.functional.cross_entropy(logits.flatten(0, 1).float(), tokens.roll(1, 1).flatten())


class Run:
    """What a script has."""

    def __init__(self, make_model=TiedModel, make_optimizer=two_groups, **settings):
        settings = {"num_microbatches": 2, "max_norm": 0.5, **settings}
        if settings.get("tp_size", 1) > 1:
            settings.setdefault("tensor_parallel_plan", PLAN)
        plugin = HybridParallelPlugin(**settings)
        self.booster = Booster(plugin=plugin)
        model = make_model()
        optimizer = make_optimizer(model.parameters())
        scheduler = LambdaLR(optimizer, lambda step: 1 / (1 + step))
        parts = self.booster.boost(model, optimizer, unpredictable, None, scheduler, sample=batches(1, 2)[0])
        self.model, self.optimizer, _, _, self.scheduler = parts
        self.replica, self.dp_size = plugin.layout.here.dp, plugin.dp_size

    def steps(self, numbers):
        """Losses, to the bit."""
        losses = []
        for batch in [batches(20, BATCH)[number] for number in numbers]:
            data = iter([replica_part(batch, self.replica, self.dp_size)])
            loss = self.booster.execute_pipeline(data, self.model, unpredictable, self.optimizer)["loss"]
            self.optimizer.step()
            self.scheduler.step()
            losses.append(loss.item().hex())
        return losses

    def everything(self):
        """This rank's tensors and counts."""
        inner = self.optimizer.unwrap()
        with self.booster.unsharded(self.model):
            tensors = {name: tensor.clone() for name, tensor in self.model.state_dict().items()}
        for index, state in enumerate(inner.state.values()):
            tensors |= {f"{index} {key}": torch.as_tensor(value).clone() for key, value in state.items()}
        for name, tensor in self.optimizer.target.tensors.items():
            tensors[f"updated {name}"] = tensor.detach().clone()
        progress = dict(vars(self.optimizer.progress))
        counts = (self.optimizer.counts, self.optimizer.loss_scaler.state, self.scheduler.get_last_lr(), progress)
        return tensors, counts


def on_layout(run, *, dp_size=1, pp_size=1, tp_size=1, **settings):
    """What ``run(make)`` gives on each rank of a layout; ``make(**more)`` makes a run."""
    sizes = {"pp_size": pp_size, "tp_size": tp_size}
    return Loopback(dp_size * pp_size * tp_size).run(lambda: run(lambda **more: Run(**{**sizes, **settings, **more})))


def resumed(make, path, **arguments):
    """What a new run resumes from."""
    run = make()
    return run.booster.resume(path, **arguments)


def tensors_in(path, step):
    """Every tensor of a checkpoint, complete."""
    manifest = open_step(path, step)
    full = {key: torch.zeros(entry.shape, dtype=getattr(torch, entry.dtype)) for key, entry in manifest.tensors.items()}
    fill(step_folder(path, step), plan_reads(manifest.tensors, [Holding.of_all(*item) for item in full.items()]))
    return full
