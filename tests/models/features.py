"""Models of images and of experts, with the batches and losses that their own examples train them with."""

import copy
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from models.pool import Result, Study
from models.table import cell
from models.tiny import RECIPES, tiny
from models.zoo import DoesNotBuild, architectures, criterion
from support import boosted, gradients_of, replica_part, sgd, whole_over_tp
from torch import Tensor, nn
from transformers import CONFIG_MAPPING

from hybridpp.cluster import Loopback

SAMPLES, TOKENS = 4, 24
TOLERANCE = 1e-5
LAYOUTS: dict[str, dict[str, Any]] = {
    "pp2": {"pp_size": 2},
    "zb-v": {"pp_size": 2, "schedule": "zb-v"},
    "tp2": {"tp_size": 2},
    "tp2pp2": {"tp_size": 2, "pp_size": 2},
    "zero3": {"zero_stage": 3},
}
"""Settings of the plugin; at zero3 there are two replicas."""

# Height and width of images, in tokens.
_SMALL, _LARGE = (1, 2), (2, 2)
IMAGES: dict[str, tuple[tuple[tuple[int, int], ...], ...]] = {
    "one image each": ((_SMALL,), (_LARGE,), (_LARGE,), (_SMALL,)),
    "none to three images": ((_SMALL,), (_LARGE, _SMALL, _SMALL), (), (_SMALL, _LARGE)),
    "a text-only micro-batch": ((_LARGE,), (_SMALL, _SMALL), (), ()),
    "videos": ((_SMALL,), (_LARGE,), (_SMALL,), (_SMALL,)),
}
EXPERTS = (
    "mixtral", "qwen2_moe", "qwen3_moe", "olmoe", "phimoe", "granitemoe", "granitemoeshared", "gpt_oss", "minimax",
    "flex_olmo", "ernie4_5_moe", "jetmoe",
)  # fmt: skip
WITH_ATTENTIONS = ("mixtral", "qwen3_moe", "olmoe", "llama", "gpt2", "vit")
VISION = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "glm4v", "glm46v", "ernie4_5_vl_moe", "paddleocr_vl", "qwen3_5")
VISION_EXPERTS = ("qwen3_vl_moe", "glm4v_moe")
PACKED = ("llama", "qwen3", "qwen2", "mixtral", "gemma2")


def _own_loss(outputs: Any, inputs: Any) -> Tensor:
    """The model's own loss. With one that balances experts, it is no mean over items: it is averaged as it is."""
    return criterion(outputs, inputs)


def _with_attentions(outputs: Any, inputs: Any) -> Tensor:
    squares = sum(attention.square().sum((1, 2, 3)).mean() for attention in outputs.attentions)
    return outputs.loss + 0.1 * squares + sum(state.square().mean() for state in outputs.hidden_states)


_own_loss.reduction = _with_attentions.reduction = "mean"  # type: ignore[attr-defined]


@dataclass
class Case:
    """A model and what it is trained with.

    Attributes:
        family: the model type.
        feature: what is special.
        name: of both, which is also the name of a file.
    """

    family: str
    feature: str
    name: str = field(init=False)

    def __post_init__(self) -> None:
        self.name = f"{self.family}, {self.feature}"

    @property
    def images(self) -> Any:
        """Of each sample; None: it is about something else."""
        return next((images for name, images in IMAGES.items() if name in self.feature), None)

    def build(self) -> "Trained":
        """The model and its batch.

        Raises:
            DoesNotBuild: there is none.
        """
        reasons = []
        for is_time_last, apart in product((False, True), repeat=2):
            try:
                config = tiny(CONFIG_MAPPING[self.family](), RECIPES[0])
                if self.images is not None:
                    _fit_to_images(config, is_time_last)
                made = self._made(config, apart)
                expected_step(made)
            except Exception as error:
                reasons.append(f"{type(error).__name__}: {error}"[:300])
            else:
                return made
        raise DoesNotBuild(reasons[0])

    def _made(self, config: Any, apart: bool) -> "Trained":
        text = config.get_text_config()
        if "router losses" in self.feature:
            for part in (config, text):
                part.output_router_logits, part.router_aux_loss_coef = True, 0.5
        if "attentions" in self.feature:
            config.output_attentions, config.output_hidden_states = True, True
        kinds = dict(next(a for a in architectures() if a.name == self.family).classes)
        tasks = ("IMAGE_TEXT_TO_TEXT", "CAUSAL_LM", "IMAGE_CLASSIFICATION")
        kind = getattr(transformers, next(kinds[task] for task in tasks if task in kinds))
        torch.manual_seed(0)
        options = {"attn_implementation": "eager"} if "attentions" in self.feature else {}
        model = kind._from_config(config, **options).train()
        if self.images is not None:
            return Trained(
                model, partial(_vision_batch, config, self.images, _Videos(apart) if "videos" in self.feature else None)
            )
        if "packed" in self.feature:
            return Trained(model, partial(_packed_batch, config))
        return Trained(model, partial(_plain_batch, config), loss=_with_attentions if options else _own_loss)


@dataclass
class Trained:
    """A model with its data.

    Attributes:
        model: in training mode.
        batch: the batch of the samples with these numbers, as a processor or collator makes it.
        loss: the criterion.
    """

    model: nn.Module
    batch: Callable[[list[int]], dict[str, Any]]
    loss: Callable[[Any, Any], Tensor] = _own_loss


CASES = (
    *(Case(family, "router losses") for family in EXPERTS),
    *(Case(family, "attentions and hidden states") for family in WITH_ATTENTIONS),
    *(Case(family, images) for family in VISION for images in list(IMAGES)[:3]),
    *(Case(family, f"router losses, {images}") for family in VISION_EXPERTS for images in list(IMAGES)[:3]),
    *(Case(family, "videos") for family in VISION[:3]),
    *(Case(family, "packed rows") for family in PACKED),
)


def _fit_to_images(config: Any, is_time_last: bool) -> None:
    """Let time, height and width turn the parts of a narrow head; windows are two tokens wide."""
    text, vision = config.get_text_config(), config.vision_config
    rotary = text.rope_parameters
    half = int(getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads) // 2
    half = int(half * rotary.get("partial_rotary_factor", 1.0))
    place = half * 3 // 8
    rotary["mrope_section"] = [place, place, half - 2 * place] if is_time_last else [half - 2 * place, place, place]
    if hasattr(vision, "window_size"):
        vision.window_size = 2 * vision.patch_size * vision.spatial_merge_size


def _random(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def _tokens(count: int, seed: int) -> Tensor:
    return torch.randint(3, 90, (count,), generator=torch.Generator().manual_seed(seed))


def _plain_batch(config: Any, numbers: list[int]) -> dict[str, Any]:
    if not hasattr(config, "vocab_size"):
        side = config.image_size
        pixels = torch.stack([_random(3, side, side, seed=number) for number in numbers])
        return {"pixel_values": pixels, "labels": torch.tensor(numbers) % 2}
    ids = torch.stack([_tokens(TOKENS, number) for number in numbers])
    mask = torch.ones_like(ids)
    mask[:, -2:] = torch.tensor([number % 2 for number in numbers])[:, None]
    return {"input_ids": ids, "attention_mask": mask, "labels": ids}


def _packed_batch(config: Any, numbers: list[int]) -> dict[str, Any]:
    """As transformers' DataCollatorWithFlattening makes it: all sequences in one row, and where each begins."""
    rows = [_tokens(TOKENS, number) for number in numbers]
    labels = [torch.cat([torch.tensor([-100]), row[1:]]) for row in rows]
    ends = torch.tensor([0, *[len(row) for row in rows]]).cumsum(0).int()
    return {
        "input_ids": torch.cat(rows)[None],
        "labels": torch.cat(labels)[None],
        "position_ids": torch.cat([torch.arange(len(row)) for row in rows])[None],
        "cu_seq_lens_q": ends,
        "cu_seq_lens_k": ends.clone(),
        "max_length_q": TOKENS,
        "max_length_k": TOKENS,
    }


class _Videos(NamedTuple):
    """Instead of images; ``apart``: the tokens of each frame between tokens of their own."""

    apart: bool


def _vision_batch(config: Any, owned: Any, videos: _Videos | None, numbers: list[int]) -> dict[str, Any]:
    """As the processors of Qwen's models make it: the patches of all images in one tensor, and a grid for each."""
    is_video = videos is not None
    vision = config.vision_config
    merge, frames = vision.spatial_merge_size, getattr(vision, "temporal_patch_size", 1)
    channels = next(getattr(vision, n) for n in ("in_channels", "in_chans", "num_channels") if hasattr(vision, n))
    token = config.video_token_id if is_video else config.image_token_id
    start, end = getattr(config, "vision_start_token_id", 91), getattr(config, "vision_end_token_id", 92)
    rows, types, grids, patches = [], [], [], []
    for number in numbers:
        row, kinds = [], []
        for place, (height, width) in enumerate(owned[number]):
            length = 2 if is_video else 1
            frames_of_one = length if videos and videos.apart else 1
            num_tokens = length * height * width // frames_of_one
            row += [start, *[token] * num_tokens, end] * frames_of_one
            kinds += [0, *[2 if is_video else 1] * num_tokens, 0] * frames_of_one
            grids.append((length, height * merge, width * merge))
            patch = (channels * frames * vision.patch_size**2,)
            if hasattr(vision, "num_channels"):
                patch = (channels, vision.patch_size, vision.patch_size)
            patches.append(_random(length * height * width * merge**2, *patch, seed=10 * number + place))
        row += _tokens(TOKENS - len(row), number).tolist()
        rows.append(row)
        types.append(kinds + [0] * (TOKENS - len(kinds)))
    ids = torch.tensor(rows)
    batch = {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "mm_token_type_ids": torch.tensor(types),
        # As many labels in each sample: then the mean over micro-batches is that over labels.
        "labels": torch.where(torch.arange(TOKENS) < TOKENS - 6, -100, ids),
    }
    if grids:
        kind = "video" if is_video else "image"
        batch[f"{kind}_grid_thw"] = torch.tensor(grids)
        batch["pixel_values_videos" if is_video else "pixel_values"] = torch.cat(patches)
    return batch


def expected_step(made: Trained) -> tuple[float, dict[str, Tensor]]:
    """Loss and gradients of a step in plain PyTorch, over micro-batches of two samples that are made one by one."""
    model = copy.deepcopy(made.model)
    total = 0.0
    for numbers in ([0, 1], [2, 3]):
        inputs = made.batch(numbers)
        loss = made.loss(model(**inputs), inputs) / 2
        loss.backward()
        total += loss.item()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    if not gradients or not all(bool(torch.isfinite(gradient).all()) for gradient in gradients.values()):
        raise DoesNotBuild("its gradients are not finite")
    return total, gradients


def trained_step(made: Trained, layout: str) -> tuple[float, dict[str, Tensor]]:
    """Loss and gradients of the same step in a layout, put together."""
    settings = LAYOUTS[layout]
    replicas = 2 if layout == "zero3" else 1

    def run() -> tuple[float, dict[str, Tensor]]:
        model = copy.deepcopy(made.model)
        options = {"num_microbatches": 2 // replicas, **settings}
        booster, model, optimizer = boosted(model, sgd, made.batch([0, 1]), **options)
        mine = replica_part([0, 1, 2, 3], booster.plugin.layout.here.dp, replicas)
        data = iter([made.batch(mine)])
        if replicas == 1:
            loss = booster.execute_pipeline(data, model, made.loss, optimizer)["loss"].item()
            return loss, whole_over_tp(booster, model, gradients_of(booster, model))
        with booster.unsharded(model):
            before = {name: p.detach().double() for name, p in model.named_parameters()}
        loss = booster.execute_pipeline(data, model, made.loss, optimizer)["loss"].item()
        optimizer.step()
        with booster.unsharded(model):
            steps = {name: (before[name] - p.detach().double()) / 0.1 for name, p in model.named_parameters()}
        return loss, {name: step.float() for name, step in steps.items()}

    size = replicas * settings.get("pp_size", 1) * settings.get("tp_size", 1)
    ranks = Loopback(size).run(run)
    gradients: dict[str, Tensor] = {}
    for _, owned in ranks:
        gradients |= owned
    return sum(loss for loss, _ in ranks) / size, gradients


def compare(made: Trained, expected: tuple[float, dict[str, Tensor]], layout: str) -> Result:
    """What comes of a layout: right, or what is wrong."""
    start = time.process_time()
    try:
        loss, gradients = trained_step(made, layout)
    except Exception as error:
        text = " ".join(str(error).split())
        return {"right": False, "error": f"{type(error).__name__}: {text}"[:600], "traceback": traceback.format_exc()}
    wrong = [f"the loss is {loss}, not {expected[0]}"] if abs(loss - expected[0]) > 1e-5 * abs(expected[0]) else []
    for name, parameter in made.model.named_parameters():
        if not parameter.requires_grad:
            continue
        right = expected[1].get(name, torch.zeros_like(parameter))
        # A step of 0.1 in fp32 shows a gradient to a part of the weight only.
        rounding = 2e-6 * max(float(parameter.abs().max()), 1e-1) if layout == "zero3" and parameter.numel() else 0.0
        limit = TOLERANCE * max(float(right.abs().max()), 1e-1) + rounding if right.numel() else 1.0
        if name not in gradients or not (gradients[name] - right).abs().max() <= limit:
            off = (gradients[name] - right).abs().max() if name in gradients else "all"
            wrong.append(
                f"{name} by {off:.1e} of {right.abs().max():.1e}" if name in gradients else f"{name} is missing"
            )
    result: Result = {"right": not wrong, "seconds": time.process_time() - start}
    return result | ({"error": f"{len(wrong)} numbers differ: {'; '.join(wrong[:3])}"} if wrong else {})


def _examine(case: Case) -> Iterator[Result]:
    try:
        made = case.build()
    except DoesNotBuild as error:
        yield {"builds": False, "reason": str(error)}
        return
    result: Result = {"builds": True, "class": type(made.model).__name__}
    expected = expected_step(made)
    for layout in LAYOUTS:
        result[layout] = compare(made, expected, layout)
        yield result


HEADING = "# Which models with images, router losses and packed rows train right"


def part(results: list[Result]) -> str:
    """Of docs/models.md, what is said of these cases."""
    built = [result for result in results if result["builds"]]
    right = [sum(result[layout]["right"] for result in built) for layout in LAYOUTS]
    alike: dict[tuple[str, ...], list[str]] = {}
    for r in built:
        family, _, feature = r["name"].partition(", ")
        verdicts = ("right" if r[layout]["right"] else "**no**" for layout in LAYOUTS)
        alike.setdefault((feature, *verdicts), []).append(family)
    rows = "\n".join(
        f"| {feature} | {', '.join(families)} | {len(families)} | {' | '.join(verdicts)} |"
        for (feature, *verdicts), families in alike.items()
    )
    failed = [(r["name"], key, r[key]["error"]) for r in built for key in LAYOUTS if not r[key]["right"]]
    failed += [(r["name"], "", f"does not build: {r['reason']}") for r in results if not r["builds"]]
    errors = "\n".join(f"| {name} | {key} | {cell(error, 300)} |" for name, key, error in failed)
    return f"""{HEADING}

Written by `make models-features` on {datetime.now(UTC):%Y-%m-%d}, with torch {torch.__version__} and transformers \
{transformers.__version__}.

Tiny models with random weights and batches as their processors and collators make them: the patches of all images in
one tensor, none to three images in a sample, micro-batches of texts alone, videos, sequences packed into one row;
losses that balance experts (`output_router_logits=True`), and losses of attentions and hidden states. A case is
*right* if the loss and **every** parameter's gradient of a step (fp32, two micro-batches of two samples) agree, to
1e-5, with the same model in one process, run on the same micro-batches, which are made sample by sample. A loss that
balances experts over a batch is in general not the mean of those over its parts, so the micro-batches are a part of
what is compared; such a criterion says `reduction = "mean"`. At zero3 there are two replicas of one micro-batch each.
Ranks are threads of one process.
Examined: {len(results)} of {len(CASES)}.

| | {" | ".join(LAYOUTS)} |
|---|{"--:|" * len(LAYOUTS)}
| right, of {len(built)} cases | {" | ".join(map(str, right))} |

| trained with | model types | cases | {" | ".join(LAYOUTS)} |
|---|---|--:|{"---|" * len(LAYOUTS)}
{rows}
""" + (
        f"""
## What fails of these cases, and what the user is told

| case | layout | error |
|---|---|---|
{errors}
"""
        if failed
        else ""
    )


def study(folder: Path) -> Study:
    """Of all cases; they are made anew."""
    return Study(_examine, tuple(LAYOUTS), 400)
