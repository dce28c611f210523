"""What a plugin does with the models that it boosted: run, save and load them, and take everything off again."""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import wraps
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar
from weakref import ref

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.swa_utils import AveragedModel

from hybridpp.checkpoint.commit import step_folder
from hybridpp.checkpoint.remote_path import AnyPath
from hybridpp.cluster import Section
from hybridpp.errors import ConfigError, DeadlockError, PeerError
from hybridpp.nn.peft_model import is_peft_model
from hybridpp.plugin import (
    Boosted,
    GeneratesText,
    InitializesModels,
    RecordsTimelines,
    Resumed,
    SavesModels,
    SavesParts,
    SavesRuns,
    UnboostsModels,
)
from hybridpp.precision import describe_dtypes
from hybridpp.saving import is_file_name
from hybridpp_plugins.adapters import save_adapters
from hybridpp_plugins.averaged_weights import AveragedWeights
from hybridpp_plugins.engine import Engine, PipelineRunner
from hybridpp_plugins.engine_handle import copied_weights, original_of
from hybridpp_plugins.folder_save import FolderSave, StartedSave
from hybridpp_plugins.generate import generate
from hybridpp_plugins.initialize import initialize_weights
from hybridpp_plugins.optimizer import HybridOptimizer
from hybridpp_plugins.part_saves import OptimizerContents, ScheduleContents, load_optimizer, load_schedule
from hybridpp_plugins.replica_loader import ReplicaDataLoader
from hybridpp_plugins.run_resume import resume_run
from hybridpp_plugins.run_saves import RunContents
from hybridpp_plugins.settings import PluginSettings
from hybridpp_plugins.stage_table import stage_table
from hybridpp_plugins.step_problems import check_before_save
from hybridpp_plugins.timeline_recording import TimelineRecording, recorded
from hybridpp_plugins.training_state import RunParts
from hybridpp_plugins.unboost import unboost
from hybridpp_plugins.weights import load_weights, save_weights, start_save_of_weights

P = ParamSpec("P")
R = TypeVar("R")
_NOTHING = nullcontext()


def _in_section(section: Section, call: str) -> Callable[[Callable[Concatenate[Any, P], R]], Callable[..., R]]:
    """A decorator of methods: what a watchdog calls the section of code, and the call. Nothing follows a lost peer."""

    def decorate(method: Callable[Concatenate[Any, P], R]) -> Callable[..., R]:
        @wraps(method)
        def run(self: "BoostedModels", *args: P.args, **kwargs: P.kwargs) -> R:
            with self._noting(call), self.layout.world.progress.inside(section, lambda: call):
                return method(self, *args, **kwargs)

        return run

    return decorate


class BoostedModels(
    PipelineRunner,
    RecordsTimelines,
    SavesModels,
    SavesRuns,
    SavesParts,
    UnboostsModels,
    InitializesModels,
    GeneratesText,
):
    """The part of a plugin that hands calls to the engine of a boosted model.

    Attributes:
        settings: of the plugin.
    """

    settings: PluginSettings

    # Of the models that this plugin boosted, which the plugin does not keep alive.
    _optimizers: "list[ref[HybridOptimizer]]"

    def _join(self, optimizer: HybridOptimizer) -> None:
        """Let the script's backward passes go through all models of this plugin."""

        def partners() -> list[HybridOptimizer]:
            alive = (one() for one in self._optimizers)
            return [one for one in alive if one is not None and one is not optimizer and not one.is_released]

        self._optimizers = [*getattr(self, "_optimizers", ()), ref(optimizer)]
        optimizer.partners = partners

    @property
    def interrupted(self) -> bool:
        """See :attr:`hybridpp.Booster.interrupted`."""
        return self.layout.world.stop.is_agreed

    @_in_section("setup", "plugin.close")
    def close(self) -> None:
        """Give back the process groups: their threads, file descriptors and device memory.

        Groups that another plugin uses, too, stay open. The models that this plugin boosted can no longer be run, saved
        or loaded by the booster, so save them before; their parameters stay. Calling it again does nothing. Without it,
        groups are given back when a later plugin is made, or ``DistCoordinator().destroy()`` is called.

        After an error that ended a call in the middle on this rank, nothing is given back: other ranks cannot agree.

        Collective: every rank of the world.
        """
        if self._closed:
            return
        if self._interruption.cause is not None:
            self._closed = True
            return
        self._saves.wait()
        self._closed = True
        self.layout.close()

    def backward(
        self, loss: Tensor, optimizer: Optimizer, num_items: Any = None, *, retain_graph: bool = False
    ) -> None:
        """See :meth:`hybridpp.Booster.backward`."""
        self._check_open()
        if not isinstance(optimizer, HybridOptimizer):
            raise ConfigError(
                f"backward needs the boosted optimizer: got {type(optimizer).__name__}. Pass the optimizer that "
                "booster.boost returned."
            )
        if self.layout.pp.size > 1:
            raise ConfigError(
                f"backward needs all stages on one rank: got pp_size={self.layout.pp.size}. "
                "Call booster.execute_pipeline, which also runs backward."
            )
        with self._scaling(lambda: optimizer.gradient_scale):
            optimizer.backward(loss, num_items=num_items, retain_graph=retain_graph)

    def no_sync(self, model: nn.Module, optimizer: Optimizer | None = None) -> AbstractContextManager[None]:
        """See :meth:`hybridpp.Booster.no_sync`."""
        return self._engine(model).no_sync()

    def unsharded(self, model: nn.Module) -> AbstractContextManager[None]:
        """See :meth:`hybridpp.Booster.unsharded`."""
        return self._noting("booster.unsharded", self._unsharded(self._engine(model)))

    @contextmanager
    def _unsharded(self, engine: Engine) -> Iterator[None]:
        target = None if engine.weights.sharded is None or engine.optimizer is None else engine.optimizer.target
        if target is not None:  # what is written inside is newer
            target.take_over()
        try:
            with engine.weights.unsharded(), engine.script_reads.watched():
                yield
                if target is not None:  # what was written to copies inside is lost, and will be refused, as to parts
                    target.take_over()
        finally:
            engine.script_reads.watch()
        if target is not None:  # what is written to copies from now on is newer
            engine.masters.copy_from_model(in_step=True)

    @_in_section("setup", "booster.averaged")
    def averaged(self, model: nn.Module, average: Callable[..., Any] | None, *, use_buffers: bool) -> AveragedModel:
        """See :meth:`hybridpp.Booster.averaged`."""
        return AveragedWeights(self._engine(model), average, use_buffers)

    @contextmanager
    def _noting(self, call: str, inside: AbstractContextManager[None] = _NOTHING) -> Iterator[None]:
        """A context for what ranks do together, with another one inside: notes that a peer was lost."""
        try:
            with inside:
                yield
        except (PeerError, DeadlockError) as error:
            self._interruption.lost_peer(error, call)
            raise

    def record_timeline(self, model: nn.Module) -> AbstractContextManager[TimelineRecording]:
        """See :meth:`hybridpp.Booster.record_timeline`."""
        return recorded(self._engine(model), self.settings)

    def describe(self, model: nn.Module) -> str:
        """A text that lists what boost added to each module and parameter of a boosted model on this rank.

        Modules of one class whose names differ only in numbers share a line, if boost added the same to them: layers
        around the forward, the outermost first, then hooks and attributes.
        """
        return self._engine(model).adapter.describe()

    def describe_stages(self, model: nn.Module) -> str:
        """A table of a boosted model's stages: where they run, their modules and parameters; the same on all ranks.

        Nothing is communicated. ``hybridpp partition`` prints more, before a job starts.
        """
        return stage_table(self._engine(model))

    def unboost(self, model: nn.Module) -> None:
        """See :meth:`hybridpp.Booster.unboost`."""
        unboost(self._engine(model))

    def describe_precision(self, model: nn.Module) -> str:
        """A table of the compute dtypes of the modules of a boosted model on this rank."""
        engine = self._engine(model)
        return describe_dtypes(engine.model, engine.module_dtypes, self.settings.precision_config.fp32_losses)

    @_in_section("save", "booster.save_model")
    def save_model(
        self, model: nn.Module, path: Path, *, shard: bool, size_per_shard_mb: int, asynchronous: bool
    ) -> None:
        """See :meth:`hybridpp.Booster.save_model`."""
        copy = copied_weights(model)
        engine = self._engine(model if copy is None else original_of(copy))
        self._saves.wait()
        if engine.optimizer is not None:
            check_before_save(engine.optimizer, "booster.save_model")
        if is_peft_model(engine.model) and (path.is_dir() or not is_file_name(path)):
            save_adapters(engine, path, copy)
            return
        max_shard_size = f"{size_per_shard_mb}MB" if shard else "1000TB"
        if asynchronous:
            started = start_save_of_weights(engine, path, max_shard_size, copy)
            self.layout.world.progress.in_background = started.awaited
            self._saves.add(StartedSave(started, started.finish))
        else:
            save_weights(engine, path, max_shard_size, copy)

    @_in_section("save", "booster.load_model")
    def load_model(self, model: nn.Module, path: Path, *, strict: bool) -> None:
        """See :meth:`hybridpp.Booster.load_model`."""
        copy = copied_weights(model)
        engine = self._engine(model if copy is None else original_of(copy))
        self._saves.wait()
        load_weights(engine, path, strict, copy)
        if isinstance(model, AveragedModel):
            # Else its first update would replace what was loaded.
            model.n_averaged.clamp_(min=1)

    @_in_section("step", "booster.generate")
    def generate(self, model: nn.Module, inputs: Any, settings: Mapping[str, Any]) -> Any:
        """See :meth:`hybridpp.Booster.generate`."""
        engine = self._engine(model)
        with engine.on_plain_weights():
            return generate(engine, inputs, settings)

    @_in_section("setup", "booster.init_model")
    def init_model(self, model: nn.Module, *, seed: int | None, initialize: Callable[[nn.Module], Any] | None) -> None:
        """See :meth:`hybridpp.Booster.init_model`."""
        engine = self._engine(model)
        with engine.on_plain_weights():
            initialize_weights(engine, seed, initialize)

    def _run_parts(self, parts: Sequence[Boosted]) -> list[RunParts]:
        return [
            RunParts(
                self._engine(part.model),
                part.lr_scheduler,
                part.dataloader if isinstance(part.dataloader, ReplicaDataLoader) else None,
                not isinstance(part.dataloader, ReplicaDataLoader | None),
            )
            for part in parts
        ]

    @_in_section("save", "booster.save")
    def save_run(
        self,
        parts: Sequence[Boosted],
        path: AnyPath,
        *,
        step: int,
        extras: Mapping[str, Any],
        keep_last: int | None,
        asynchronous: bool,
    ) -> None:
        """See :meth:`hybridpp.Booster.save`."""
        run_parts = self._run_parts(parts)
        self._saves.wait()
        for part in run_parts:
            if part.engine.optimizer is not None:
                check_before_save(part.engine.optimizer, "booster.save")
        contents = RunContents(run_parts, path, step, extras, keep_last, self._saves.reported)
        self._saves.run(FolderSave(self.layout, step_folder(path, step), contents), asynchronous=asynchronous)

    @_in_section("save", "booster.wait_for_save")
    def wait_for_save(self) -> None:
        """See :meth:`hybridpp.Booster.wait_for_save`."""
        self._check_open()
        self._saves.wait()

    @_in_section("save", "booster.resume")
    def resume_run(
        self, parts: Sequence[Boosted], path: AnyPath, *, start_fresh: bool, resumed: Collection[str]
    ) -> Resumed:
        """See :meth:`hybridpp.Booster.resume`."""
        run_parts = self._run_parts(parts)
        self._saves.wait()
        return resume_run(run_parts, path, start_fresh=start_fresh, resumed=resumed)

    def _engine_and_optimizer(self, part: Boosted) -> tuple[Engine, HybridOptimizer]:
        engine = self._engine(part.model)
        assert engine.optimizer is not None
        return engine, engine.optimizer

    @_in_section("save", "booster.save_optimizer")
    def save_optimizer(self, part: Boosted, path: Path, *, file_bytes: int, asynchronous: bool) -> None:
        """See :meth:`hybridpp.Booster.save_optimizer`."""
        engine, optimizer = self._engine_and_optimizer(part)
        self._saves.wait()
        check_before_save(optimizer, "booster.save_optimizer")
        contents = OptimizerContents(engine, optimizer)
        self._saves.run(FolderSave(self.layout, path, contents, file_bytes), asynchronous=asynchronous)

    @_in_section("save", "booster.load_optimizer")
    def load_optimizer(self, part: Boosted, path: Path) -> None:
        """See :meth:`hybridpp.Booster.load_optimizer`."""
        engine, optimizer = self._engine_and_optimizer(part)
        self._saves.wait()
        load_optimizer(engine, optimizer, path)

    @_in_section("save", "booster.save_lr_scheduler")
    def save_lr_scheduler(self, lr_scheduler: Any, path: Path) -> None:
        """See :meth:`hybridpp.Booster.save_lr_scheduler`."""
        self._check_open()
        self._saves.wait()
        self._saves.run(FolderSave(self.layout, path, ScheduleContents(lr_scheduler)), asynchronous=False)

    @_in_section("save", "booster.load_lr_scheduler")
    def load_lr_scheduler(self, lr_scheduler: Any, path: Path) -> None:
        """See :meth:`hybridpp.Booster.load_lr_scheduler`."""
        self._check_open()
        self._saves.wait()
        load_schedule(self.layout.control, lr_scheduler, path)
