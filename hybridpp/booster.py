"""The class that training scripts use: boost a model and an optimizer, then run steps."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import DataLoader

from hybridpp.boosted import check_kinds
from hybridpp.boosted_runs import BoostedRuns
from hybridpp.booster_adapters import BoosterAdapters
from hybridpp.errors import ConfigError, shown
from hybridpp.optim import JoinedOptimizer
from hybridpp.plugin import (
    Boosted,
    Criterion,
    GeneratesText,
    InitializesModels,
    Plugin,
    RecordsTimelines,
    RunsPipeline,
    StepOptions,
    UnboostsModels,
    configure_with,
)

# Compared by identity, as an array has no truth value; another text of these letters is only checked.
_LAST = "last"


class Booster(BoosterAdapters):
    """Turns an ordinary training script into a parallel one.

    Args:
        plugin: a plugin, or the name of one (``Plugin.from_name`` accepts settings as well). None:
            ``HybridParallelPlugin()``, which trains a complete replica on every rank.
        mixed_precision: ``"fp32"``, ``"fp16"`` or ``"bf16"``, if ``plugin`` is None, a name, or an object that was made
            without a precision (``TorchDDPPlugin()``). None: the plugin's default.
        device: where to compute, for example ``"cpu"``; the job's backend must carry its tensors. None: this rank's
            CUDA device if it has one, else the CPU.
        plugin_kwargs: settings of the plugin, if ``plugin`` is a name.

    Raises:
        ConfigError: the plugin or the precision is unknown, the precision is given twice, the named plugin has no
            precision, or settings are given beside an object.

    Example:
        >>> Booster(plugin="low_level_zero", plugin_kwargs={"stage": 2}, mixed_precision="bf16").plugin.zero_stage
        2
    """

    def __init__(
        self,
        plugin: Plugin | str | None = None,
        mixed_precision: Literal["fp32", "fp16", "bf16"] | None = None,
        device: str | torch.device | None = None,
        plugin_kwargs: Mapping[str, Any] | None = None,
    ):
        _check_arguments(mixed_precision, plugin_kwargs)
        if isinstance(plugin, Plugin):
            if plugin_kwargs:
                raise ConfigError(
                    f"plugin_kwargs are settings of a plugin that is given by name: got {dict(plugin_kwargs)} and a "
                    f"{type(plugin).__name__}. Pass them to the plugin."
                )
            if mixed_precision is not None:
                plugin.set_precision(mixed_precision)
        elif plugin is None or isinstance(plugin, str):
            plugin = Plugin.from_name(plugin or "hybrid_parallel", **_settings(mixed_precision, plugin_kwargs or {}))
        else:
            raise ConfigError(
                f"plugin must be a Plugin, a plugin's name, or None: got {type(plugin).__name__}. "
                "Pass HybridParallelPlugin(...)."
            )
        self.plugin: Plugin = plugin
        self._device = None if device is None else _device(device)
        self._runs = BoostedRuns()

    @property
    def interrupted(self) -> bool:
        """Whether a rank of the job got SIGTERM or SIGUSR1: the same on every rank after the same ``execute_pipeline``.

        A script that sees it calls :meth:`save`, and ends; :meth:`resume` goes on. The signal is told in messages that
        the ranks exchange anyway: those of a training step that has ended, of the batch of an evaluation, or of
        :meth:`backward`, at the next call. So it stays False for a step or two. It is never True before the first step,
        where signals end the process at once, nor in a process that joined no job.

        Example:
            if booster.interrupted:
                booster.save("outputs/run", step=step)
                break
        """
        return self.plugin.interrupted

    @property
    def gradient_scale(self) -> float:
        """The factor by which the loss of the running pass counts in the gradients that backward passes add up.

        It is the share of the micro-batch in the mean over the batches of all replicas, times the loss scale of fp16.
        Code that adds a gradient of its own in a backward pass, such as that of an auxiliary loss, multiplies it by
        this; then it is independent of the layout. In ``execute_pipeline`` it is known on every rank, in the forward
        and in the backward pass of each micro-batch; in :meth:`backward`, in the backward pass. Elsewhere, and in
        evaluation, it is 1.0. Nothing is communicated.

        Example:
            class AddLoss(torch.autograd.Function):
                @staticmethod
                def forward(ctx, x, loss):
                    return x.clone()

                @staticmethod
                def backward(ctx, gradient):
                    return gradient, torch.tensor(booster.gradient_scale, device=gradient.device)
        """
        return self.plugin.gradient_scale

    def boost(
        self,
        model: nn.Module,
        optimizer: Optimizer | list[Optimizer] | tuple[Optimizer, ...] | None = None,
        criterion: Criterion | None = None,
        dataloader: DataLoader[Any] | None = None,
        lr_scheduler: LRScheduler | None = None,
        *,
        sample: Any = None,
        samples: Sequence[Any] | None = None,
        model_inputs: str | int | Sequence[str | int] | Mapping[str, str | int] | None = None,
        loss_reduction: Literal["mean", "sum"] | None = None,
    ) -> Boosted:
        """Prepare a model and its optimizer for training. Call it once, with the complete model.

        The model keeps its class and its names. After the call it holds only this rank's parameters. The optimizer
        works on these and keeps the settings of every parameter group.

        If it raises (or is interrupted), the model and the optimizer are as they were before the call, so that it can
        be called again with other settings. If this rank's shard or stages were all that was left of the model by then,
        a note of the exception says so, and the model must be made anew.

        Collective: all ranks of the world, with the same model and weights.

        Args:
            model: any module, with the same weights on every rank; or a module on the meta device, whose weights and
                buffers are then all set by :meth:`load_model`, or by the script, before the first step.
            optimizer: any ``torch.optim`` optimizer over all parameters to train; or a list of several, each on its
                parameters, of which one is made that takes the step of each (``hybridpp.optim.JoinedOptimizer``).
            criterion: ``criterion(outputs, inputs)`` -> scalar; returned unchanged.
            dataloader: returned unchanged. One sample of its dataset shows how the model is called.
            lr_scheduler: made on ``optimizer``. The returned one does not advance at skipped steps.
            sample: a small batch like the training batches. Needed only if the model is cut into stages or sharded,
                ``dataloader`` is not given, and no batch can be made from the model's configuration.
            samples: instead of ``sample``, a list with one small batch of each kind, where batches take different ways
                through the model (a head for each task): each stage then holds what any of them uses there.
            model_inputs: what the model gets of a batch: names of a dict's entries, indices of a tuple's, or a dict
                from the forward's arguments to these: ``{"pixel_values": 0}`` for ``(image, label)`` pairs. What it
                leaves is the target of a torch loss. None: all entries that the forward accepts.
            loss_reduction: what criteria return over the samples of a micro-batch that do not declare it by an
                attribute ``reduction`` (a mean of one whose class has an argument of that name is no declaration);
                None: a mean, which is checked in the first step.

        Returns:
            The five parts, in the order of the arguments, as a named tuple.

        Raises:
            ConfigError: the parts do not fit together.
            PartitionError: the model cannot be cut into this number of stages.
        """
        options = {"samples": samples, "model_inputs": model_inputs, "loss_reduction": loss_reduction}
        given = {name: value for name, value in options.items() if value is not None}
        parts = Boosted(model, optimizer, criterion, dataloader, lr_scheduler)  # type: ignore[arg-type]  # a list: see below
        check_kinds(parts)
        if isinstance(optimizer, list | tuple):
            parts = parts._replace(optimizer=JoinedOptimizer(optimizer))
        parts = configure_with(self.plugin, parts, device=self._device, sample=sample, **given)
        self._runs.add(parts)
        return parts

    def execute_pipeline(
        self,
        data_iter: Iterator[Any],
        model: nn.Module,
        criterion: Criterion | None = None,
        optimizer: Optimizer | None = None,
        return_loss: bool = True,
        return_outputs: bool = False,
        *,
        return_losses: bool = False,
        outputs_on: Literal["last", "first", "all"] = "last",
        num_microbatches: int | None = None,
    ) -> dict[str, Any]:
        """Run one batch: forward, loss and, if gradients are enabled, backward.

        Collective: every rank of the world, with the same options.

        Args:
            data_iter: yields this replica's batch: a dict (``model(**batch)``), a tuple or list (``model(*batch)``) or
                a tensor. Entries that are no arguments of the forward go to the criterion only. The batch is split
                along dimension 0, or along the plugin's ``batch_dims``. Batch size and shapes may change at every
                call.
            model: the boosted model.
            criterion: ``criterion(outputs, inputs)`` returns the mean loss of a micro-batch as a scalar tensor.
                ``criterion(outputs)`` works too, and so does a loss of torch's, whose target is the last entry of a
                tuple, or the one entry of a dict that is no argument of the forward; a module of two arguments, or a
                function whose second one is called ``target``, ``labels`` or the like, is called as those are. A
                method ``num_items(inputs)`` returns the number of items that the mean is over (for example tokens that
                are not padding); without it, items are samples. An attribute ``reduction = "sum"`` declares a sum over
                samples instead of a mean. May be None only if ``return_loss`` is False and gradients are disabled.
            optimizer: the boosted optimizer; required if gradients are enabled.
            return_loss: whether to compute the loss.
            return_outputs: whether to return the model's outputs.
            return_losses: whether to return the loss of each micro-batch, too.
            outputs_on: which ranks of a pipeline get the outputs: those of the ``"last"`` stage, which compute them;
                those of the ``"first"``; or ``"all"``. They are sent after the step, and keep only their values.
            num_microbatches: number of micro-batches of this batch; None: as the plugin is set.

        Returns:
            ``loss``: on every rank, a detached fp32 scalar, the mean (or sum) over this replica's batch; None if
            ``return_loss`` is False. In evaluation it waits for the last stage when it is read. ``num_items``: on every
            rank, what this loss is a mean over (docs/losses.md), float64 in host memory; it weighs batches in a mean
            over them, waits as the loss does, and counts samples of a sum. ``outputs``: on the
            ranks of ``outputs_on``, the model's output, merged over the micro-batches; None on other ranks and unless
            ``return_outputs``. ``losses``, with ``return_losses``: on every rank, what the criterion returned for each
            micro-batch of this replica, fp32 ``[num_microbatches]`` in host memory, NaN for one without items.

        Raises:
            ConfigError: the arguments do not fit together, or the criterion returns a sum without declaring it.
            DataError: the batch cannot be split, the model cannot be called with it, or the ranks of a pipeline hold
                different batches.
            NonFiniteLossError: in training, a micro-batch's loss is NaN or infinite. Evaluation returns such a loss.
            UnequalRanksError: ranks that share layers (``tp_size`` > 1) computed different losses.
            StopIteration: every rank is out of data.
        """
        if not isinstance(self.plugin, RunsPipeline):
            raise ConfigError(
                f"{type(self.plugin).__name__} runs no pipeline. Use HybridParallelPlugin, with pp_size=1 or more."
            )
        options = StepOptions(
            return_loss=return_loss,
            return_outputs=return_outputs,
            return_losses=return_losses,
            outputs_on=outputs_on,
            num_microbatches=num_microbatches,
        )
        is_usual = return_losses is False and outputs_on is _LAST and type(return_loss) is type(return_outputs) is bool
        if not is_usual or num_microbatches is not None:
            options.check()
        return self.plugin.execute_pipeline(data_iter, model, criterion, optimizer, options)

    def backward(
        self,
        loss: Tensor,
        optimizer: Optimizer,
        num_items: float | Tensor | None = None,
        *,
        retain_graph: bool = False,
    ) -> None:
        """Backward pass of a loss that the script computed by calling the model; requires ``pp_size=1``.

        The gradient is that of the loss of all replicas' batches: each replica's loss counts by what it is a mean over,
        which is read from its graph (docs/losses.md). The loss may go through other models of this booster, too: it
        adds to their gradients, which their optimizers use. Collective: every rank of the world; inside
        :meth:`no_sync` all replicas of this rank's, which exchange their numbers of items.

        Args:
            loss: scalar, with a graph.
            optimizer: that :meth:`boost` returned.
            num_items: that this replica's loss is a mean over, a number or a tensor of one element; on all replicas or
                on none. None: what is found.
            retain_graph: as of torch: whether another pass may go through the same graph.

        Raises:
            ConfigError: there are stages on other ranks, the optimizer is not boosted, ``num_items`` is no number, or
                the loss reads weights of which this rank has a part, or none (a penalty). Without ``num_items``: the
                loss puts samples together, or replicas' losses are made in different ways.
            UnlikeCallsError: replicas called it otherwise.
        """
        # Plugins need not know what is not asked for.
        given = () if num_items is None else (num_items,)
        self.plugin.backward(loss, optimizer, *given, **({"retain_graph": True} if retain_graph else {}))

    def no_sync(self, model: nn.Module, optimizer: Optimizer | None = None) -> AbstractContextManager[None]:
        """A context in which each replica accumulates gradients locally; the next step outside reduces them.

        All replicas call :meth:`backward` as often in it: each tells the others its number of items.
        """
        return self.plugin.no_sync(model, optimizer)

    def unsharded(self, model: nn.Module) -> AbstractContextManager[None]:
        """A context in which this rank holds all weights of its stages, which ``zero_stage=3`` divides over replicas.

        What is written to them is kept; every replica must write the same. Inside, ``state_dict``, copies of the model
        and reads of parameters work. With other settings weights are always there, and it does nothing.

        Collective: every rank of the world, at the start of the block.

        Example:
            with booster.unsharded(model), torch.no_grad():
                model.head.weight.zero_()
        """
        return self.plugin.unsharded(model)

    def averaged(
        self, model: nn.Module, multi_avg_fn: Callable[..., Any] | None = None, *, use_buffers: bool = False
    ) -> AveragedModel:
        """An average of a boosted model's weights (EMA, SWA, a teacher), in fp32 whatever the model computes in.

        It is torch's ``AveragedModel`` of the fp32 weights that are trained: in bf16 and fp16, an ``AveragedModel`` of
        the model itself loses small steps. ``average.update_parameters(model)`` follows each step; ``save_model`` and
        ``load_model`` take it. It holds all weights of this rank's stages and shards, on every replica.

        Args:
            model: that ``boost`` returned, with an optimizer.
            multi_avg_fn: as of torch's class, ``get_ema_multi_avg_fn(0.999)`` for example; None: equal weights.
            use_buffers: whether buffers are averaged, too; else they are copied.

        Collective: every rank of the world, and so is ``update_parameters``.

        Raises:
            ConfigError: the model was boosted without an optimizer.
        """
        return self.plugin.averaged(model, multi_avg_fn, use_buffers=use_buffers)

    def record_timeline(self, model: nn.Module) -> AbstractContextManager[Any]:
        """A context that records what each rank did in the steps inside it, and when; an update inside it, too.

        After the block, ``recording.save(folder)`` writes all of it on rank 0, for ``hybridpp report``;
        ``recording.recording`` is the same as a :class:`hybridpp.report.Recording`. ``recording.timeline`` is a
        :class:`hybridpp.timeline.Timeline` of this replica's pipeline, which can be drawn, traced and simulated.
        Clocks of several hosts are aligned to within about one message latency.

        Collective: every rank of the world, at the start and at the end of the block.

        Example:
            with booster.record_timeline(model) as recording:
                booster.execute_pipeline(data_iter, model, criterion, optimizer)
                optimizer.step()
            recording.save("outputs/run")
        """
        if not isinstance(self.plugin, RecordsTimelines):
            raise ConfigError(f"{type(self.plugin).__name__} records no timelines. Use HybridParallelPlugin.")
        return self.plugin.record_timeline(model)

    def generate(self, model: nn.Module, inputs: Any = None, **settings: Any) -> Any:
        """Generate text with a boosted model: the tokens that ``model.generate`` of the complete model would return.

        Greedy search, sampling and beams are those of transformers; each token is one evaluation of the model, on the
        new token where each stage can keep the keys and values of its layers, else on all tokens so far. With several
        replicas, each generates from its own inputs.

        Collective: every rank of the world; those of one replica with the same inputs and, to sample, the same state of
        torch's generator (``torch.manual_seed``).

        Args:
            model: the boosted model, of transformers: a decoder, or an encoder with a decoder.
            inputs: token numbers ``[B, T]``, or a dict with ``input_ids``, ``attention_mask`` and so on.
            settings: of ``generate`` of transformers: ``max_new_tokens``, ``do_sample``, ``num_beams``, and so on.

        Returns:
            On every rank, what transformers returns: token numbers ``[B, T + new]``, by default.

        Raises:
            ConfigError: the model does not generate, or a setting is not supported.
            DataError: the ranks of a replica have different inputs, or have sampled different tokens.
        """
        if not isinstance(self.plugin, GeneratesText):
            raise ConfigError(f"{type(self.plugin).__name__} generates no text. Use HybridParallelPlugin.")
        return self.plugin.generate(model, inputs, settings)

    def init_model(
        self, model: nn.Module, *, seed: int | None = None, initialize: Callable[[nn.Module], Any] | None = None
    ) -> None:
        """Set all weights and persistent buffers of a boosted model to initial values, for training from scratch.

        With a model that was boosted on the meta device, no rank ever holds more than its share and one tensor. Values
        are computed by the modules' own ``_init_weights`` (as in transformers) or ``reset_parameters``, tensor by
        tensor, with random numbers of the seed and the tensor's name: they are the same in every layout, but not those
        of a model that is made with values.

        Collective: every rank of the world.

        Args:
            model: the boosted model.
            seed: of the random numbers; None: that of the run (``launch_from_torch(seed=...)``).
            initialize: ``initialize(module)`` is called for each tensor with the module that holds it, and with those
                above it, instead of their own methods.

        Raises:
            ConfigError: nothing initialises a weight; raised on every rank, and no weight has changed.
        """
        if not isinstance(self.plugin, InitializesModels):
            raise ConfigError(f"{type(self.plugin).__name__} initialises no models. Boost a model that has weights.")
        self.plugin.init_model(model, seed=seed, initialize=initialize)

    def unboost(self, model: nn.Module) -> nn.Module:
        """Take everything off a boosted model again: no wrapped forward, no hook and no attribute of ours is left.

        Its weights are those that the optimizer works on, in the dtype that they had before :meth:`boost`; gradients
        are forgotten. The optimizer that was given to ``boost`` (``optimizer.unwrap()``) works on the model's
        parameters again, with its state; the boosted one is used no more.

        Collective: every rank of the world, if replicas divide the model or its optimizer (ZeRO), of which each gets
        all; else nothing is communicated.

        Args:
            model: the boosted model, which every rank holds all of (``tp_size=1``, ``pp_size=1``).

        Returns:
            The same model; it can be boosted again.

        Raises:
            ConfigError: ranks hold parts of the model by ``tp_size`` or ``pp_size``, the script has replaced a
                ``forward`` or an attribute since, or state of parts of parameters cannot be put together.
        """
        if not isinstance(self.plugin, UnboostsModels):
            raise ConfigError(f"{type(self.plugin).__name__} cannot unboost models. Save the model and load it anew.")
        self.plugin.unboost(model)
        self._runs.remove(model)
        return model


def _check_arguments(mixed_precision: Any, plugin_kwargs: Any) -> None:
    if mixed_precision is not None and not isinstance(mixed_precision, str):
        raise ConfigError(
            f"mixed_precision must be 'fp32', 'fp16' or 'bf16', or None: got mixed_precision={shown(mixed_precision)}."
        )
    if plugin_kwargs is None:
        return
    if not isinstance(plugin_kwargs, Mapping) or not all(isinstance(name, str) for name in plugin_kwargs):
        raise ConfigError(
            "plugin_kwargs must be a dict of a plugin's settings by name: got "
            f"plugin_kwargs={plugin_kwargs!r:.200}. Write plugin_kwargs={{'num_microbatches': 4}}."
        )


def _device(device: Any) -> torch.device:
    try:
        return torch.device(device)
    except (RuntimeError, TypeError, ValueError) as error:
        raise ConfigError(
            f"device must be a torch.device or its name: got device={device!r:.200}. Pass 'cpu' or 'cuda', or "
            "leave it out."
        ) from error


def _settings(mixed_precision: str | None, given: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a plugin that is made by name."""
    if mixed_precision is None:
        return dict(given)
    if given.get("precision", mixed_precision) != mixed_precision:
        raise ConfigError(
            f"mixed_precision and precision are one setting: got mixed_precision={shown(mixed_precision)} and "
            f"precision={given['precision']!r}. Give one of them."
        )
    return {**given, "precision": mixed_precision}
