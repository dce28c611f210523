"""Every architecture that transformers registers, made tiny, with a batch, by rules that name no model."""

import copy
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
import transformers
from models.batches import Batch, batches
from models.tiny import RECIPES, Recipe, tiny
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

# In the order in which a model type's class is looked for: what it was made for first.
_TASKS = (
    "SEQ_TO_SEQ_CAUSAL_LM",
    "SPEECH_SEQ_2_SEQ",
    "CTC",
    "MASKED_LM",
    "IMAGE_TEXT_TO_TEXT",
    "MULTIMODAL_LM",
    "CAUSAL_LM",
    "IMAGE_CLASSIFICATION",
    "VIDEO_CLASSIFICATION",
    "AUDIO_CLASSIFICATION",
    "SEMANTIC_SEGMENTATION",
    "OBJECT_DETECTION",
    "DEPTH_ESTIMATION",
    "MASKED_IMAGE_MODELING",
    "SEQUENCE_CLASSIFICATION",
    "",
)
MAX_MIB, MAX_SECONDS = 100, 20.0


class DoesNotBuild(Exception):
    """A model that no rule here can make, or that is not what it takes to be compared."""


class Buildable(Protocol):
    """Something that a specimen can be made of."""

    @property
    def name(self) -> str:
        """Which is also the name of a file."""

    def build(self) -> "Specimen":
        """A model that trains.

        Raises:
            DoesNotBuild: there is none.
        """


@dataclass(frozen=True)
class Architecture:
    """A registered model type and the classes it is registered with.

    Attributes:
        name: the model type.
        classes: task and class, the preferred one first.
    """

    name: str
    classes: tuple[tuple[str, str], ...]

    def build(self) -> "Specimen":
        """As `build` makes it."""
        return build(self)


@dataclass
class Specimen:
    """A tiny model that runs.

    Attributes:
        model: in training mode.
        batch: with which it gives a loss.
        task: under which its class is registered; empty for the bare model.
    """

    model: nn.Module
    batch: Batch
    task: str


def architectures() -> tuple[Architecture, ...]:
    """Everything in transformers' registry, by name."""
    found: dict[str, list[tuple[str, str]]] = {}
    for task in _TASKS:
        key = f"MODEL_FOR_{task}_MAPPING_NAMES" if task else "MODEL_MAPPING_NAMES"
        for name, classes in getattr(modeling_auto, key).items():
            for kind in [classes] if isinstance(classes, str) else classes:
                found.setdefault(name, []).append((task, kind))
    return tuple(Architecture(name, tuple(classes)) for name, classes in sorted(found.items()))


def criterion(outputs: Any, inputs: Any) -> Tensor:
    """The model's own loss; where it has none, the mean square of everything it returns."""
    loss = getattr(outputs, "loss", None)
    if isinstance(loss, Tensor):
        return loss.mean()
    tensors = [leaf for leaf in pytree.tree_leaves(_plain(outputs)) if isinstance(leaf, Tensor)]
    squares = [leaf.square().mean() for leaf in tensors if leaf.is_floating_point() and leaf.requires_grad]
    if not squares:
        raise DoesNotBuild("nothing in its output has a gradient")
    return torch.stack([square.to(squares[0].dtype) for square in squares]).sum()


def mean_of_microbatches(outputs: Any, inputs: Any) -> Tensor:
    """:func:`criterion`, as it is: what two towers return compares the samples of a micro-batch."""
    return criterion(outputs, inputs)


mean_of_microbatches.reduction = "mean"  # type: ignore[attr-defined]


def criterion_for(batch: Batch) -> Callable[[Any, Any], Tensor]:
    """The criterion of a model that gets this batch: without labels, its outputs have no loss."""
    has_labels = any("label" in name or name.endswith("_positions") for name in batch)
    return criterion if has_labels else mean_of_microbatches


def _plain(tree: Any) -> Any:
    return {key: _plain(value) for key, value in tree.items()} if isinstance(tree, dict) else tree


def build(architecture: Architecture, **changes: Any) -> Specimen:
    """The first class, recipe and batch with which the architecture trains; ``changes`` of every recipe.

    Raises:
        DoesNotBuild: with the reason that the first try gave.
    """
    reasons: list[str] = []
    recipes = [replace(recipe, **changes) for recipe in RECIPES]
    for task, kind in _distinct(architecture.classes):
        for attempt in _attempts(architecture.name, task, kind, recipes, reasons):
            return attempt
    raise DoesNotBuild(reasons[0] if reasons else "no class")


def _distinct(classes: tuple[tuple[str, str], ...]) -> Iterator[tuple[str, str]]:
    # The preferred class and the bare model: more tries cost time and find little.
    yield classes[0]
    if classes[-1][1] != classes[0][1]:
        yield classes[-1]


def _attempts(name: str, task: str, kind: str, recipes: Sequence[Recipe], reasons: list[str]) -> Iterator[Specimen]:
    start = time.process_time()
    for recipe in recipes:
        if time.process_time() - start > MAX_SECONDS:
            return
        try:
            with _time_limit():
                config = tiny(CONFIG_MAPPING[name](), recipe)
                _check_size(getattr(transformers, kind), config)
                torch.manual_seed(0)
                model = getattr(transformers, kind)(config).train()
        except Exception as error:
            reasons.append(_reason(error))
            continue
        for batch in batches(model, task):
            try:
                with _time_limit():
                    # A copy: some models keep what they computed.
                    check_runs(copy.deepcopy(model), batch)
            except Exception as error:
                reasons.append(_reason(error))
            else:
                yield Specimen(model, batch, task)


@contextmanager
def _time_limit() -> Iterator[None]:
    """Stop what takes too long; time of the CPU, so that it does not matter what else the machine does."""

    def stop(*_: Any) -> None:
        raise DoesNotBuild(f"takes more than {MAX_SECONDS:.0f} s")

    previous = signal.signal(signal.SIGPROF, stop)
    signal.setitimer(signal.ITIMER_PROF, MAX_SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, previous)


def _reason(error: Exception) -> str:
    text = " ".join(str(error).split())
    return text if isinstance(error, DoesNotBuild) else f"{type(error).__name__}: {text}"


def _check_size(kind: Any, config: Any) -> None:
    try:
        with torch.device("meta"):
            model = kind(copy.deepcopy(config))
    except Exception as error:
        if "meta" not in str(error):
            raise
        return  # some cannot be built without numbers
    mib = sum(tensor.numel() * tensor.element_size() for tensor in (*model.parameters(), *model.buffers())) / 2**20
    if mib > MAX_MIB:
        raise DoesNotBuild(f"needs {mib:.0f} MiB, more than {MAX_MIB}")


def check_runs(model: nn.Module, batch: Batch) -> None:
    """Take two steps.

    Raises:
        DoesNotBuild: they do not agree, or give no finite gradients.
    """
    torch.manual_seed(1)
    loss, gradients = plain_step(model, batch, 2)
    if not torch.isfinite(loss) or not all(torch.isfinite(gradient).all() for gradient in gradients.values()):
        raise DoesNotBuild("its loss or a gradient is not finite")
    if not any(gradient.any() for gradient in gradients.values()):
        raise DoesNotBuild("all its gradients are zero")
    torch.manual_seed(2)
    again, same = plain_step(model, batch, 2)
    if not torch.allclose(loss, again, rtol=1e-6, atol=1e-7) or not all(
        torch.allclose(same[name], gradient, rtol=1e-5, atol=1e-6) for name, gradient in gradients.items()
    ):
        raise DoesNotBuild("not deterministic by itself")


def plain_step(model: nn.Module, batch: Batch, num_microbatches: int) -> tuple[Tensor, dict[str, Tensor]]:
    """Loss and gradients of a step in plain PyTorch, micro-batch by micro-batch."""
    model.zero_grad()
    total = torch.zeros((), dtype=torch.float64)
    parts = {name: value.chunk(num_microbatches) for name, value in batch.items()}
    # Sums of the model's own (CTC by default) add up; means are averaged.
    is_sum = type(model).__name__.endswith("ForCTC") and model.config.ctc_loss_reduction == "sum"
    for place in range(num_microbatches):
        inputs = {name: part[place].clone() for name, part in parts.items()}
        loss = criterion(model(**inputs), inputs) / (1 if is_sum else num_microbatches)
        loss.backward()
        total += loss.detach()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return total, gradients
