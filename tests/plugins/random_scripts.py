"""Random training scripts, as people write them, each against the same script in plain torch.

make scripts ARGS="[--count 200] [--seed 0] [--only 17,42] [--match REGEX] [--processes] [--here]"

A script is drawn from its number: a model with its batches and loss (``script_models.py``), an optimizer, a layout with
a schedule, a precision, and what the loop does between steps. It trains the same weights in plain torch on the batches
of all replicas, in fp32 and in one process, and with the library. Each ends as one of:

- ``equal``: every weight, every loss of a replica's batch and what the script read are those of plain torch;
- ``refused``: boost or the first call that cannot be right raised an error of the library's, the same on every rank;
- ``WRONG``, ``RAW`` (an error of another kind), ``HANG``: faults.
"""

import argparse
import logging
import random
import re
import sys
import tempfile
import time
import warnings
from collections import Counter, UserDict
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from plugins.script_models import STYLES, Style
from processes import RankFailed, run_forked, run_ranks
from support import replica_part, whole_over_tp
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from hybridpp import Booster, HybridAdam, HybridParallelPlugin
from hybridpp.cluster import Loopback
from hybridpp.errors import DeadlockError, HybridppError, PeerError
from hybridpp.optim import JoinedOptimizer

NUM_STEPS, SAMPLES, MISSING_AT_THE_END = 4, 8, 3
BOUND, LOSS_SCALE = 0.15, 1024.0
HALF = {"bf16": torch.bfloat16, "fp16": torch.float16}


class Lookahead(torch.optim.SGD):
    """Every second step goes half of the way back, as wrappers of optimizers do."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        parameters = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        slow = [self.state[p].setdefault("slow", p.clone()) for p in parameters]
        found = super().step(closure)
        for group in self.param_groups:
            group["count"] = group.get("count", 0) + 1
        if self.param_groups[0]["count"] % 2 == 0:
            for parameter, before in zip(parameters, slow, strict=True):
                before.lerp_(parameter, 0.5)
                parameter.copy_(before)
        return found


class ScheduleFree(torch.optim.Optimizer):
    """Trains at one point and is evaluated at another: ``train`` and ``eval`` move the weights between them."""

    def __init__(self, params: Any, lr: float, beta: float = 0.9):
        super().__init__(params, {"lr": lr, "beta": beta, "is_training": True, "k": 0})

    @torch.no_grad()
    def _move(self, weight: Callable[[float], float], is_training: bool) -> None:
        for group in self.param_groups:
            if group["is_training"] is not is_training:
                for parameter in group["params"]:
                    if "z" in self.state[parameter]:
                        parameter.lerp_(self.state[parameter]["z"], weight(group["beta"]))
                group["is_training"] = is_training

    def eval(self) -> None:
        self._move(lambda beta: 1 - 1 / beta, False)

    def train(self) -> None:
        self._move(lambda beta: 1 - beta, True)

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        for group in self.param_groups:
            group["k"] += 1
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                z = self.state[parameter].setdefault("z", parameter.clone())
                parameter.lerp_(z, 1 / group["k"])
                parameter.add_(parameter.grad, alpha=group["lr"] * (group["beta"] * (1 - 1 / group["k"]) - 1))
                z.sub_(parameter.grad, alpha=group["lr"])


def _groups(model: nn.Module) -> list[dict[str, Any]]:
    """The usual two: weights decay, biases and norms do not."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    return [
        {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": 0.1},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]


def _muon(model: nn.Module) -> Any:
    matrices = [p for name, p in model.named_parameters() if p.dim() == 2 and re.search("block|layer|stages", name)]
    ours = set(matrices)
    rest = [p for p in model.parameters() if p not in ours]
    others = torch.optim.AdamW(rest, lr=0.01, eps=1e-3)
    return [torch.optim.Muon(matrices, lr=0.02), others] if matrices else others


# An eps above the gradients' rounding, so that first steps do not make rounding as large as gradients: of an element
# that is zero but for rounding, Adam and Adafactor take the sign.
OPTIMIZERS: dict[str, Callable[[nn.Module], Any]] = {
    "sgd": lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
    "momentum": lambda model: torch.optim.SGD(_groups(model), lr=0.1, momentum=0.9, nesterov=True),
    "adamw": lambda model: torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-3),
    "adamw groups": lambda model: torch.optim.AdamW(_groups(model), lr=0.01, eps=1e-3),
    "hybrid adam": lambda model: HybridAdam(model.parameters(), lr=0.01, eps=1e-3),
    "rmsprop": lambda model: torch.optim.RMSprop(model.parameters(), lr=0.005, eps=1e-2),
    "nadam": lambda model: torch.optim.NAdam(model.parameters(), lr=0.01, eps=1e-3),
    "adafactor": lambda model: torch.optim.Adafactor(model.parameters(), lr=0.01, eps=(1e-3, 1e-3)),
    "muon": _muon,
    "lookahead": lambda model: Lookahead(model.parameters(), lr=0.05, momentum=0.9),
    "schedule-free": lambda model: ScheduleFree(model.parameters(), lr=0.1),
}
# Newton and Schulz's steps run in bf16.
ROUNDS = {"muon": 2e-1}
BETWEEN = (
    "ema", "clamp", "clamp data", "freeze", "no gradient", "evaluate", "accumulate", "schedule", "zero_grad", "set lr",
    "read norm", "clip", "overwrite", "state dict", "resume", "own loop", "save model",
)  # fmt: skip
# What more scripts do; drawn apart, so that the rest of a script is the same without it.
MORE = ("frozen at the start", "skip", "no_sync", "swap", "averaged")
FORMS = ("as it is", "as it is", "list or mapping", "with more entries", "microbatch size")
TWO_CHUNKS = ("interleaved", "interleaved-zb", "zb-v")
SCHEDULES = ("1f1b", "gpipe", "eager-1f1b", "interleaved", "zb-h1", "zb-h2", "interleaved-zb", "zb-v")


@dataclass(frozen=True, kw_only=True)
class Script:
    """What one script consists of."""

    style: str
    loss: str
    optimizer: str
    precision: str
    dp: int
    tp: int
    pp: int
    settings: dict[str, Any] = field(default_factory=dict)
    between: tuple[str, ...] = ()
    form: str = "as it is"

    def __str__(self) -> str:
        layout = f"dp{self.dp} tp{self.tp} pp{self.pp} {self.precision}"
        settings = " ".join(f"{name}={value}" for name, value in self.settings.items())
        doing = ", ".join(self.between) or "-"
        return "; ".join((self.style, self.loss, self.optimizer, layout, settings, self.form, doing))

    @property
    def num_ranks(self) -> int:
        return self.dp * self.tp * self.pp


def drawn(number: int) -> Script:
    """The script of a number."""
    dice = random.Random(number)
    style = dice.choice(list(STYLES))
    layouts = [(dp, tp, pp) for dp in (1, 2, 3) for tp in (1, 2) for pp in (1, 2, 4) if dp * tp * pp <= 4]
    dp, tp, pp = dice.choice(layouts)
    settings: dict[str, Any] = {}
    count = dice.choice((1, 2, 4, 4))
    if pp > 1:
        # Styles have four blocks.
        settings["schedule"] = schedule = dice.choice([one for one in SCHEDULES if pp == 2 or one not in TWO_CHUNKS])
        if schedule != "1f1b" and schedule != "gpipe":
            count = 4
        if schedule in TWO_CHUNKS:
            settings["num_model_chunks"] = 2
    settings["num_microbatches"] = count
    if dp > 1 and (stage := dice.choice((0, 1, 2, 3))):
        settings["zero_stage"] = stage
    if dice.random() < 0.15:
        settings["offload_optimizer"] = dice.choice((0.5, 1.0))
    has_sequences = re.search("gpt|llama|bert|t5|vit|experts", style) is not None
    if tp > 1 and dice.random() < 0.25 and has_sequences:
        settings["enable_sequence_parallelism"] = True
    if dice.random() < 0.2:
        settings["gradient_checkpoint_config"] = {}
    if dice.random() < 0.3:
        settings["max_norm"] = 0.3
    between = dice.sample(BETWEEN, dice.choice((0, 1, 1, 2)))
    precision = dice.choice(("fp32", "fp32", "fp32", "bf16", "fp16"))
    if pp > 1 and "own loop" in between:  # is refused
        between.remove("own loop")
    optimizer = dice.choice(list(OPTIMIZERS))
    if tp > 1 and optimizer in ("muon", "adafactor") and dice.random() < 0.8:  # they need whole parameters
        optimizer = "adamw"
    more = random.Random(f"more of {number}")
    if more.random() < 0.5:
        between.append(more.choice(MORE))
    form = more.choice(FORMS)
    if form == "microbatch size":
        if settings.get("schedule", "1f1b") in ("1f1b", "gpipe", "zb-h1"):
            del settings["num_microbatches"]
            settings["microbatch_size"] = more.choice((1, 2, 3, 4))
        form = "as it is"
    loss = dice.choice(list(STYLES[style].losses))
    if STYLES[style].losses[loss].is_coupled and settings.get("schedule", "1f1b") in ("1f1b", "gpipe"):
        settings.pop("microbatch_size", None)
        settings["num_microbatches"] = 1
    return Script(
        style=style,
        loss=loss,
        optimizer=optimizer,
        precision=precision,
        dp=dp,
        tp=tp,
        pp=pp,
        settings=settings,
        between=tuple(between),
        form=form,
    )


@dataclass(kw_only=True)
class Found:
    """What a script ends with; of a rank, or of plain torch.

    Attributes:
        weights, averages, saved: by name; without those of other stages.
        losses: by step, of the replica's batch; in plain torch by replica, too.
        evaluations, norms: the same.
    """

    weights: dict[str, Tensor] = field(default_factory=dict)
    averages: dict[str, Tensor] = field(default_factory=dict)
    saved: dict[str, Tensor] = field(default_factory=dict)
    losses: list[Any] = field(default_factory=list)
    evaluations: list[Any] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    replica: int = 0


def batches_of(script: Script, style: Style) -> Iterator[tuple[Any, ...]]:
    """For each step the batches of all replicas, one for each call; the last are incomplete."""
    generator = torch.Generator().manual_seed(1)
    for step in range(NUM_STEPS):
        missing = MISSING_AT_THE_END if step == NUM_STEPS - 1 else 0
        calls = 2 if {"accumulate", "no_sync"} & {*script.between} else 1
        yield tuple(style.batch(SAMPLES * script.dp - missing, generator) for _ in range(calls))


def formed(script: Script, style: Style, part: Any) -> Any:
    """A replica's batch in the form in which the script has it."""
    if script.form == "list or mapping":
        return UserDict(part) if isinstance(part, dict) else list(part)
    if script.form == "with more entries" and isinstance(part, dict):
        texts = [f"sample {number}" for number in range(len(next(iter(part.values()))))]
        return part | (
            {"return_dict": True, "output_attentions": None} if style.is_hub else {"texts": texts, "epoch": 3}
        )
    return part


def written(model: nn.Module) -> list[str]:
    """The names of the parameters that scripts write to, or freeze."""
    names = [name for name, _ in model.named_parameters()]
    return [names[len(names) // 2], names[-1]]


def change_weights(script: Script, model: nn.Module, names: list[str], step: int) -> None:
    """What scripts do to weights after a step."""
    parameters = dict(model.named_parameters())
    if "clamp" in script.between:
        with torch.no_grad():
            for parameter in parameters.values():
                parameter.clamp_(-BOUND, BOUND)
    if "clamp data" in script.between:
        for parameter in parameters.values():
            parameter.data.clamp_(-BOUND, BOUND)
    chosen = [parameters[name] for name in names if name in parameters]
    if "overwrite" in script.between and step == 1:
        with torch.no_grad():
            for parameter in chosen:
                parameter.fill_(0.125)
    if "state dict" in script.between and step == 1:
        model.load_state_dict({name: 0.5 * tensor for name, tensor in model.state_dict().items()})


def freeze(script: Script, model: nn.Module, names: list[str], step: int) -> None:
    if "freeze" in script.between and step == 1:
        for name, parameter in model.named_parameters():
            if name in names:
                parameter.requires_grad_(False)


def made(script: Script, style: Style) -> nn.Module:
    """The model as the script makes it."""
    model = style.make()
    if "frozen at the start" in script.between:
        parameters = list(model.parameters())
        for parameter in parameters[: len(parameters) // 3]:
            parameter.requires_grad_(False)
    return model


def is_skipped(script: Script, step: int) -> bool:
    """Whether the script drops the gradients instead of a step."""
    return "skip" in script.between and step == 1


@torch.no_grad()
def swap_in(model: nn.Module) -> dict[str, Tensor]:
    """Other weights, as an evaluation of averages has them; returns those before, which go back by :func:`swap_out`."""
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    for parameter in model.parameters():
        parameter.mul_(0.5)
    return before


@torch.no_grad()
def swap_out(model: nn.Module, before: dict[str, Tensor]) -> None:
    for name, parameter in model.named_parameters():
        parameter.copy_(before[name])


def forget_gradients(script: Script, model: nn.Module, names: list[str]) -> None:
    if "no gradient" in script.between:
        for name, parameter in model.named_parameters():
            if name in names:
                parameter.grad = None


def schedules_of(optimizer: Any) -> list[Any]:
    optimizers = optimizer if isinstance(optimizer, list) else [optimizer]
    return [torch.optim.lr_scheduler.StepLR(one, step_size=1, gamma=0.5) for one in optimizers]


def in_plain_torch(script: Script, precision: str = "fp32") -> Found:
    """The script as it is without the library; in half precision with autocast, and a loss scale in fp16."""
    style, found = STYLES[script.style], Found()
    loss, model = style.losses[script.loss], made(script, style)
    optimizer = OPTIMIZERS[script.optimizer](model)
    optimizers = optimizer if isinstance(optimizer, list) else [optimizer]
    names, lr_schedulers = written(model), schedules_of(optimizer) if "schedule" in script.between else []
    is_averaged = {"ema", "averaged"} & {*script.between}
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.5)) if is_averaged else None
    scale = LOSS_SCALE if precision == "fp16" else 1.0

    def loss_of(batch: Any) -> Tensor:
        # Without its cache, which keeps what no_grad has rounded, without a graph.
        with torch.autocast("cpu", HALF.get(precision), precision in HALF, cache_enabled=False):
            return loss.of(style.call(model, batch), batch)

    def losses_of(batch: Any) -> list[float]:
        parts = [replica_part(batch, replica, script.dp) for replica in range(script.dp)]
        with torch.no_grad():
            # A coupled loss is that of the whole batch on every replica.
            return [loss_of(batch if loss.is_coupled else part).item() for part in parts]

    for step, calls in enumerate(batches_of(script, style)):
        for batch in calls:
            found.losses.append(losses_of(batch))
            (scale * loss_of(batch) / len(calls)).backward()
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.grad /= scale
        if "clip" in script.between:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.2)
        forget_gradients(script, model, names)
        max_norm = script.settings.get("max_norm") or float("inf")  # of the step: of the gradients that it gets
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm).item()
        for one in optimizers:
            if not is_skipped(script, step):
                one.step()
            one.zero_grad()
        if not is_skipped(script, step):
            found.norms.append(norm)
        for lr_scheduler in lr_schedulers:
            lr_scheduler.step()
        if "set lr" in script.between:
            for one in optimizers:
                for group in one.param_groups:
                    group["lr"] *= 0.7
        change_weights(script, model, names, step)
        freeze(script, model, names, step)
        if average is not None:
            average.update_parameters(model)
        if {"evaluate", "swap"} & {*script.between}:
            if script.optimizer == "schedule-free":
                optimizer.eval()
            model.eval()
            before = swap_in(model) if "swap" in script.between else {}
            found.evaluations.append(losses_of(calls[0]))
            swap_out(model, before) if before else None
            model.train()
            if script.optimizer == "schedule-free":
                optimizer.train()
    found.weights = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    if average is not None:
        found.averages = {name: p.detach().clone() for name, p in average.module.named_parameters()}
    if "save model" in script.between:
        found.saved = found.weights
    return found


def with_the_library(script: Script, folder: str) -> Found:
    """The same script, on this rank."""
    style, found = STYLES[script.style], Found()
    loss, names = style.losses[script.loss], written(style.make())
    all_calls = list(batches_of(script, style))

    def boost() -> tuple[Any, ...]:
        plugin = HybridParallelPlugin(
            tp_size=script.tp, pp_size=script.pp, precision=script.precision, **script.settings
        )
        booster, model = Booster(plugin=plugin), made(script, style)
        optimizer = OPTIMIZERS[script.optimizer](model)
        lr_scheduler = None
        if "schedule" in script.between:
            if isinstance(optimizer, list):
                optimizer = JoinedOptimizer(optimizer)
            [lr_scheduler] = schedules_of(optimizer)
        first_part = replica_part(all_calls[0][0], 0, script.dp)
        sample = formed(script, style, replica_part(first_part, 0, SAMPLES // 2))
        model, optimizer, _, _, lr_scheduler = booster.boost(
            model, optimizer, loss.criterion, lr_scheduler=lr_scheduler, sample=sample
        )
        return booster, model, optimizer, lr_scheduler

    def whole(booster: Booster, model: nn.Module) -> Any:
        return booster.unsharded(model) if script.settings.get("zero_stage") == 3 else nullcontext()

    booster, model, optimizer, lr_scheduler = boost()
    here = booster.plugin.layout.here.dp
    found.replica = here
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.5)) if "ema" in script.between else None
    if average is None and "averaged" in script.between:
        average = booster.averaged(model, get_ema_multi_avg_fn(0.5))

    def criterion_of(num_calls: int) -> Any:
        if num_calls == 1:
            return loss.criterion

        def half(outputs: Any, inputs: Any) -> Tensor:
            return loss.of(outputs, inputs) / num_calls

        if loss.adds_up:
            half.reduction = "sum"  # type: ignore[attr-defined]
        half.coupled = loss.is_coupled  # type: ignore[attr-defined]
        return half

    criterion = criterion_of(len(all_calls[0]))
    for step, calls in enumerate(all_calls):
        for number, batch in enumerate(calls):
            part = replica_part(batch, here, script.dp)
            waits = "no_sync" in script.between and number == 0
            with booster.no_sync(model, optimizer) if waits else nullcontext():
                if "own loop" in script.between:
                    value = loss.of(style.call(model, part), part) / len(calls)
                    # Replicas' losses are averaged, so who adds up over samples multiplies by their number.
                    booster.backward(value * script.dp if loss.adds_up else value, optimizer)
                else:
                    part = formed(script, style, part)
                    value = booster.execute_pipeline(iter([part]), model, criterion, optimizer)["loss"]
            found.losses.append(value.item() * len(calls))
        if "clip" in script.between:
            optimizer.clip_grad_by_norm(0.2)
        forget_gradients(script, model, names)
        if not is_skipped(script, step):
            optimizer.step()
        if "zero_grad" in script.between or is_skipped(script, step):
            optimizer.zero_grad()
        if "read norm" in script.between and not is_skipped(script, step):
            found.norms.append(float(optimizer.get_grad_norm()))
        if lr_scheduler is not None:
            lr_scheduler.step()
        if "set lr" in script.between:
            for group in optimizer.param_groups:
                group["lr"] *= 0.7
        with whole(booster, model):
            change_weights(script, model, names, step)
        freeze(script, model, names, step)
        if average is not None:
            average.update_parameters(model)
        if {"evaluate", "swap"} & {*script.between}:
            if script.optimizer == "schedule-free":
                optimizer.eval()
            model.eval()
            with whole(booster, model):
                before = swap_in(model) if "swap" in script.between else {}
            part = formed(script, style, replica_part(calls[0], here, script.dp))
            with torch.no_grad():
                value = booster.execute_pipeline(iter([part]), model, loss.criterion)["loss"]
            found.evaluations.append(value.item())
            with whole(booster, model):
                swap_out(model, before) if before else None
            model.train()
            if script.optimizer == "schedule-free":
                optimizer.train()
        if "resume" in script.between and step == 1:
            booster.save(folder + "/run", step=step)
            booster, model, optimizer, lr_scheduler = boost()
            freeze(script, model, names, step)
            booster.resume(folder + "/run")
    with booster.unsharded(model):
        weights = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
        found.weights = whole_over_tp(booster, model, weights)
    if average is not None:
        averages = {name: p.detach().clone() for name, p in average.module.named_parameters()}
        found.averages = whole_over_tp(booster, model, averages)
    if "save model" in script.between:
        booster.save_model(model, folder + "/model.safetensors")
        fresh = Booster(plugin=HybridParallelPlugin(tp_size=script.tp, pp_size=script.pp, **_only_cuts(script)))
        sample = formed(script, style, replica_part(all_calls[0][0], 0, script.dp))
        other = fresh.boost(style.make(), sample=sample).model
        fresh.load_model(other, folder + "/model.safetensors")
        found.saved = whole_over_tp(fresh, other, {n: p.detach().clone() for n, p in other.named_parameters()})
    return found


def _only_cuts(script: Script) -> dict[str, Any]:
    names = "schedule", "num_model_chunks", "num_microbatches", "microbatch_size"
    return {name: script.settings[name] for name in names if name in script.settings}


def _tensors_off(
    script: Script,
    what: str,
    actual: dict[str, Tensor],
    expected: dict[str, Tensor],
    rounded: dict[str, Tensor],
    start: dict[str, Tensor],
) -> Iterator[str]:
    """Of which tensors the change since the start is another than plain torch's.

    What half precision may round is three times what autocast rounds in plain torch, and a little of the change.
    """
    tolerance = {"fp32": 2e-4, "bf16": 0.06, "fp16": 0.02}[script.precision] + ROUNDS.get(script.optimizer, 0.0)
    if script.precision != "fp32":
        tolerance += 20 * ROUNDS.get(script.optimizer, 0.0)
    unit = {"fp32": 1e-6, "bf16": 2**-8, "fp16": 2**-11}[script.precision]
    # AveragedModel(model) is itself in half precision, which rounds each update; booster.averaged is not.
    unit *= 1.5 if what == "averages" and "ema" in script.between else 0.6
    changes = {name: tensor - start[name] for name, tensor in expected.items()}
    num_elements = sum(change.numel() for change in changes.values())
    typical = (sum(change.square().sum() for change in changes.values()) / num_elements).sqrt()
    for name in expected.keys() - actual.keys():
        yield f"{what} {name} is missing"
    for name, tensor in actual.items():
        if name not in expected:
            yield f"{what} {name} is unknown"
            continue
        off = (tensor.float() - expected[name]).norm()
        floor = 0.02 * typical * tensor.numel() ** 0.5
        allowed = tolerance * max(changes[name].norm(), floor) + unit * expected[name].norm()
        allowed += 3 * (rounded[name] - expected[name]).norm()
        if not off <= allowed:
            yield f"{what} {name} is off by {off / max(changes[name].norm(), floor):.1e} of its change"


def faults(script: Script, ranks: list[Found], plain: Found, rounded: Found) -> list[str]:
    """What is not as in plain torch, whose own half precision gives ``rounded``."""
    start = {name: p.detach() for name, p in STYLES[script.style].make().named_parameters()}
    near = {"fp32": 1e-5, "bf16": 1e-2, "fp16": 2e-3}[script.precision] + ROUNDS.get(script.optimizer, 0.0)
    found: list[str] = []

    def compare(what: str, actual: list[float], expected: list[float], half: list[float]) -> None:
        for step, (one, other, third) in enumerate(zip(actual, expected, half, strict=True)):
            if not abs(one - other) <= near * max(0.1, abs(other)) + 3 * abs(third - other):
                found.append(f"{what} {step}: {one:.6f} for {other:.6f}")
                return

    for rank in ranks:
        of_replica = [
            [[losses[rank.replica] for losses in one.losses], [losses[rank.replica] for losses in one.evaluations]]
            for one in (plain, rounded)
        ]
        compare("loss", rank.losses, of_replica[0][0], of_replica[1][0])
        compare("evaluation", rank.evaluations, of_replica[0][1], of_replica[1][1])
        if rank.norms:
            compare("norm", rank.norms, plain.norms, rounded.norms)
    for kind in ("weights", "averages", "saved"):
        whole: dict[str, Tensor] = {}
        for rank in ranks:
            for name, tensor in getattr(rank, kind).items():
                if name in whole and not torch.equal(whole[name], tensor):
                    found.append(f"{kind} {name} differ between ranks")
                whole[name] = tensor
        if expected := getattr(plain, kind):
            found += _tensors_off(script, kind, whole, expected, getattr(rounded, kind), start)
    return found


def verdict(script: Script, processes: bool = False) -> str:
    """How the script ends, in words."""
    disabled = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return _verdict(script, processes)
    finally:
        logging.disable(disabled)


def _verdict(script: Script, processes: bool) -> str:
    plain = in_plain_torch(script)
    rounded = plain if script.precision == "fp32" else in_plain_torch(script, script.precision)
    for weights in (plain.weights, rounded.weights):
        assert all(torch.isfinite(tensor).all() for tensor in weights.values()), "plain torch diverges"
    with tempfile.TemporaryDirectory() as folder:
        run = partial(with_the_library, script, folder)
        try:
            ranks = (
                run_ranks(run, script.num_ranks, timeout_s=100) if processes else Loopback(script.num_ranks).run(run)
            )
        except DeadlockError as error:
            return f"HANG {error}"
        except HybridppError as error:
            kind = "RAW " if isinstance(error, PeerError) else "refused "
            return f"{kind}{type(error).__name__}: {error}"
        except RankFailed as error:
            refusals = re.findall(r"hybridpp\.errors\.(\w+): (.*)", str(error))
            refused = [": ".join(one) for one in refusals if not re.match("Deadlock|Peer|RefusedByPeer", one[0])]
            return f"refused {refused[-1]}" if refused else f"RAW {error}"
        except Exception as error:
            return f"RAW {type(error).__name__}: {error}"
    found = faults(script, ranks, plain, rounded)
    return f"WRONG {'; '.join(found[:3])} ({len(found)})" if found else "equal"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=200, help="how many scripts")
    parser.add_argument("--seed", type=int, default=0, help="number of the first one")
    parser.add_argument("--only", default="", help="numbers of scripts, with commas between them")
    parser.add_argument("--match", default="", help="regular expression of the scripts' descriptions")
    parser.add_argument("--processes", action="store_true", help="gloo processes instead of ranks in one process")
    parser.add_argument("--here", action="store_true", help="in this process, with the whole traceback of an error")
    options = parser.parse_args()
    torch.set_num_threads(1)
    numbers = range(options.seed, options.seed + options.count)
    chosen = [int(number) for number in options.only.split(",")] if options.only else numbers
    counts: Counter[str] = Counter()
    start = time.monotonic()
    for number in chosen:
        script = drawn(number)
        if not re.search(options.match, str(script)):
            continue
        try:
            run = partial(verdict, script, options.processes)
            result = run() if options.here else run_forked(run, timeout_s=180)
        except RankFailed as error:
            result = f"HANG {error}" if "seconds" in str(error) or "time" in str(error) else f"RAW {error}"
        counts[result.split(" ")[0]] += 1
        print(f"{number:5} {script}\n      {' '.join(result.split())[:1000]}", flush=True)
    total = ", ".join(f"{count} {kind}" for kind, count in counts.most_common())
    print(f"{total} of {counts.total()} scripts in {time.monotonic() - start:.0f} s")
    sys.exit(bool(counts.keys() - {"equal", "refused"}))


if __name__ == "__main__":
    main()
