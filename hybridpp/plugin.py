"""What a plugin is: the object that decides how :class:`hybridpp.Booster` trains.

To write one, subclass :class:`Plugin` and override the hooks that change. Further capabilities are base classes of
their own, which the booster checks with ``isinstance``: :class:`RunsPipeline` (``execute_pipeline``),
:class:`SavesModels` (``save_model``, ``load_model``), :class:`SavesRuns` (``save``, ``resume``), :class:`SavesParts`
(``save_optimizer``, ``load_lr_scheduler``, …), :class:`RecordsTimelines` (``record_timeline``) and
:class:`PreviewsTensorParallel` (``hybridpp partition --tp-size``). plugins/README.md has a complete one.

The booster passes on what the script gave, and checks only what is the same for every plugin. A plugin checks the rest,
on every rank alike and before a collective, and raises subclasses of :class:`hybridpp.errors.HybridppError`.
"""

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import DataLoader, Dataset

from hybridpp.boosted import Boosted, Criterion
from hybridpp.config import require_bools
from hybridpp.errors import ConfigError, shown, text_of
from hybridpp.pipeline import InputSelection, num_samples, to_plain_containers
from hybridpp.plugin_saves import InitializesModels, Resumed, SavesModels, SavesParts, SavesRuns
from hybridpp.registry import load_plugin
from hybridpp.tp_preview import PreviewsTensorParallel, SequenceParallelBlock, TensorParallelPreview

__all__ = [
    "Boosted",
    "Criterion",
    "GeneratesText",
    "InitializesModels",
    "Plugin",
    "PreviewsTensorParallel",
    "RecordsTimelines",
    "Resumed",
    "RunsPipeline",
    "SavesModels",
    "SavesParts",
    "SavesRuns",
    "SequenceParallelBlock",
    "StepOptions",
    "TensorParallelPreview",
    "UnboostsModels",
    "plugin_class",
]


class Plugin:
    """A way to train. Each hook has a default that trains on one device, without changing anything.

    A plugin may be used by several boosters and for several models. Its ``__init__`` takes its settings; by name
    (:meth:`from_name`, ``Booster(plugin="name")``) it is called with the keywords that were given, and with none at all
    where none were.

    Examples:
        >>> class FrozenBias(Plugin):
        ...     def configure(self, parts, *, device=None, sample=None):
        ...         for name, parameter in parts.model.named_parameters():
        ...             parameter.requires_grad_(not name.endswith("bias"))
        ...         return parts
        >>> parts = FrozenBias().configure(Boosted(nn.Linear(2, 2)))
        >>> [parameter.requires_grad for parameter in parts.model.parameters()]
        [True, False]
    """

    @staticmethod
    def from_name(name: str, **settings: Any) -> "Plugin":
        """A new plugin of the class that is registered as ``name``.

        Args:
            name: ``"hybrid_parallel"``, ``"torch_ddp"``, ``"low_level_zero"``, ``"gemini"``, ``"torch_fsdp"``, or an
                entry point of the group ``hybridpp.plugins`` of an installed package.
            settings: what the class is constructed with; a plugin without arguments takes none.

        Raises:
            ConfigError: there is no plugin of that name, or it does not take these settings.

        Example:
            >>> Plugin.from_name("hybrid_parallel", num_microbatches=4).pp_size
            1
        """
        found = plugin_class(name)
        parameters = inspect.signature(found).parameters.values()
        try:
            inspect.signature(found).bind(**settings)
        except TypeError as error:
            known = ", ".join(parameter.name for parameter in parameters) or "none"
            raise ConfigError(
                f"plugin {name!r} cannot be made of these settings: {text_of(error)}. It takes: {known}."
            ) from error
        return found(**settings)

    def configure(
        self,
        parts: Boosted,
        *,
        device: torch.device | None = None,
        sample: Any = None,
        model_inputs: InputSelection | None = None,
        loss_reduction: Literal["mean", "sum"] | None = None,
    ) -> Boosted:
        """Prepare the parts of a run for training; ``Booster.boost`` returns the result.

        Collective where the plugin communicates: every rank calls it, with the same model and weights.

        Args:
            parts: as the script gave them.
            device: where to compute; None: the plugin chooses.
            sample: a small batch like those to come, or None.
            model_inputs, loss_reduction: as ``Booster.boost`` got them.

        Returns:
            The parts to train with. By default the same ones.
        """
        return parts

    def backward(
        self, loss: Tensor, optimizer: Optimizer, num_items: Any = None, *, retain_graph: bool = False
    ) -> None:
        """Add the gradient of a loss that the script computed by calling the boosted model.

        Args:
            loss: scalar, with a graph.
            optimizer: the one that :meth:`configure` returned; a loss scale belongs to it.
            num_items: that the loss is a mean over; replicas are weighted by it.
            retain_graph: whether another pass may go through the same graph.
        """
        loss.backward(retain_graph=retain_graph)  # type: ignore[no-untyped-call]  # torch does not type it

    def no_sync(self, model: nn.Module, optimizer: Optimizer | None = None) -> AbstractContextManager[None]:
        """A context in which gradients accumulate on each replica without being reduced.

        The first backward pass after it reduces them. By default there is nothing to reduce.
        """
        return nullcontext()

    def unsharded(self, model: nn.Module) -> AbstractContextManager[None]:
        """A context in which this rank holds all weights of the model that it computes with. By default it does."""
        return nullcontext()

    def averaged(self, model: nn.Module, average: Callable[..., Any] | None, *, use_buffers: bool) -> AveragedModel:
        """An average of the weights that are trained. By default the model has them itself."""
        return AveragedModel(model, multi_avg_fn=average, use_buffers=use_buffers)

    def set_precision(self, precision: str) -> None:
        """Train in the precision that the script gave ``Booster``, if the plugin leaves it open. By default it refuses.

        Args:
            precision: ``"fp32"``, ``"fp16"`` or ``"bf16"``.

        Raises:
            ConfigError: the plugin has a precision of its own.
        """
        raise ConfigError(
            f"precision is a setting of the plugin: got mixed_precision={shown(precision)} and a "
            f"{type(self).__name__}. Pass precision={precision!r} to the plugin."
        )

    def control_precision(self) -> bool:
        """Whether the plugin has a precision of its own, so that ``Booster`` takes no ``mixed_precision`` beside it."""
        return True

    def supported_precisions(self) -> list[str]:
        """The precisions that the plugin trains in."""
        return ["fp32"]

    def supported_devices(self) -> list[str]:
        """The kinds of devices that the plugin trains on."""
        return ["cpu", "cuda"]

    def support_no_sync(self) -> bool:
        """Whether :meth:`no_sync` works."""
        return True

    def support_lora(self) -> bool:
        """Whether ``Booster.enable_lora`` works. Models that peft has made may be boosted with any plugin."""
        return True

    def prepare_dataloader(self, dataset: Dataset[Any], batch_size: int, **options: Any) -> DataLoader[Any]:
        """A dataloader over this replica's share of the dataset. The script calls it, before ``boost``.

        Args:
            dataset: the complete dataset, the same on every rank.
            batch_size: samples per replica and step.
            options: further arguments of ``torch.utils.data.DataLoader``.
        """
        return DataLoader(dataset, batch_size, **options)

    @property
    def holds_results(self) -> bool:
        """Whether this rank stands for its replica where results are summed: one rank of those that have the outputs.

        By default every rank is a replica.
        """
        return True

    @property
    def interrupted(self) -> bool:
        """Whether the job was told to stop, the same on every rank after the same step. By default it never is."""
        return False

    @property
    def gradient_scale(self) -> float:
        """The factor on the loss of the pass that runs, in its gradient. By default there is none."""
        return 1.0

    def count_samples(self, batch: Any) -> int:
        """The number of samples of a batch. By default they are in dimension 0."""
        return num_samples(to_plain_containers(batch))

    def close(self) -> None:
        """Give back what the plugin holds of the process, such as process groups. The script calls it.

        Collective where the plugin communicates: every rank calls it. A second call does nothing. By default there is
        nothing to give back.
        """


def plugin_class(name: str) -> type[Plugin]:
    """The class of the plugin that is registered as ``name``.

    Raises:
        ConfigError: there is none of that name, or it is no plugin.
    """
    found = load_plugin(name)
    if not (isinstance(found, type) and issubclass(found, Plugin)):
        raise ConfigError(f"plugin {name!r} must be a subclass of hybridpp.plugin.Plugin: got {shown(found)}.")
    return found


OutputRanks = Literal["last", "first", "all"]


@dataclass(frozen=True, kw_only=True)
class StepOptions:
    """What one call of ``execute_pipeline`` computes and returns; the same on all ranks.

    Attributes:
        return_loss: whether to return the batch's loss.
        return_outputs: whether to return the model's outputs.
        return_losses: whether to return the loss of each micro-batch.
        outputs_on: which ranks of a pipeline get the outputs: those of the last stage, those of the first, or all.
        num_microbatches: of this batch; None: as the plugin is set.
    """

    return_loss: bool = True
    return_outputs: bool = False
    return_losses: bool = False
    outputs_on: OutputRanks = "last"
    num_microbatches: int | None = None

    def check(self) -> None:
        """Refuse options that are wrong or do not fit together.

        Raises:
            ConfigError: with what to change.
        """
        flags = {name: getattr(self, name) for name in ("return_loss", "return_outputs", "return_losses")}
        # Comparisons of numpy's numbers give its own class of bools.
        require_bools(**{name: flag for name, flag in flags.items() if type(flag).__name__ not in ("bool", "bool_")})
        if not isinstance(self.outputs_on, str) or self.outputs_on not in get_args(OutputRanks):
            raise ConfigError(f"outputs_on is one of {', '.join(get_args(OutputRanks))}: got {shown(self.outputs_on)}.")
        if self.outputs_on != "last" and not self.return_outputs:
            raise ConfigError(
                f"outputs_on={self.outputs_on!r} says who gets the outputs: got return_outputs=False. Pass "
                "return_outputs=True."
            )
        count: Any = self.num_microbatches
        if count is not None and (isinstance(count, bool) or not isinstance(count, int) or count < 1):
            raise ConfigError(f"num_microbatches must be an integer of at least 1, or None: got {shown(count)}.")


def configure_with(plugin: Plugin, parts: Boosted, **options: Any) -> Boosted:
    """``plugin.configure`` with the options that it has.

    Raises:
        ConfigError: it has another one not, which may be newer than the plugin.
    """
    try:
        inspect.signature(plugin.configure).bind(parts, **options)
    except TypeError as error:
        raise ConfigError(
            f"{type(plugin).__name__} cannot boost with these options: {text_of(error)}. Leave it out."
        ) from error
    return plugin.configure(parts, **options)


class RunsPipeline(ABC):
    """A plugin that splits a batch into micro-batches and runs them: ``Booster.execute_pipeline`` needs it."""

    @abstractmethod
    def execute_pipeline(
        self,
        data_iter: Iterator[Any],
        model: nn.Module,
        criterion: Criterion | None,
        optimizer: Optimizer | None,
        options: StepOptions,
    ) -> dict[str, Any]:
        """Take one batch of ``data_iter`` and run forward, loss and, where gradients are enabled, backward.

        Collective: every rank of the world. The arguments, the result and the errors are those of
        :meth:`hybridpp.Booster.execute_pipeline`.

        Returns:
            ``{"loss": ..., "num_items": ..., "outputs": ...}`` and, with ``return_losses``, ``"losses"``; see there.
        """


class RecordsTimelines(ABC):
    """A plugin that records when each rank did what: ``Booster.record_timeline`` needs it."""

    @abstractmethod
    def record_timeline(self, model: nn.Module) -> AbstractContextManager[Any]:
        """A context whose value has, after the block has ended, ``timeline``, a :class:`hybridpp.timeline.Timeline`,
        ``recording``, a :class:`hybridpp.report.Recording`, and ``save(path)``, which rank 0 writes that with.

        Collective: every rank of the world, at the start and at the end of the block.
        """


class GeneratesText(ABC):
    """A plugin that generates text with boosted models: ``Booster.generate`` needs it."""

    @abstractmethod
    def generate(self, model: nn.Module, inputs: Any, settings: Mapping[str, Any]) -> Any:
        """What ``generate`` of the complete model returns. Collective: every rank of the world.

        Args:
            model: the boosted model.
            inputs: as :meth:`hybridpp.Booster.generate` got them.
            settings: further arguments of ``generate`` of transformers' models.
        """


class UnboostsModels(ABC):
    """A plugin that can take everything off its models again."""

    @abstractmethod
    def unboost(self, model: nn.Module) -> None:
        """Let a model be as before boost, but for what it learned; see :meth:`hybridpp.Booster.unboost`.

        Args:
            model: the boosted model; nothing is left on it of what ``configure`` put there.

        Raises:
            ConfigError: something cannot be taken off; then nothing is.
        """
