"""A training loop over epochs, which calls hooks."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import torch

from hybridpp.boosted import check_batches
from hybridpp.booster import Booster
from hybridpp.cluster import get_dist_logger
from hybridpp.config import require_bools
from hybridpp.errors import ConfigError, DataError
from hybridpp.pipeline import ReadAheadIterator
from hybridpp.plugin import Boosted, Resumed
from hybridpp.trainer.batches import Batches
from hybridpp.trainer.hook import Hook, check_intervals
from hybridpp.trainer.hooks.loss import LossHook
from hybridpp.trainer.hooks.lr_scheduler import LRSchedulerHook
from hybridpp.trainer.hooks.progress import ProgressHook
from hybridpp.trainer.state import TrainerState


class Trainer(TrainerState):
    """Runs epochs of steps and evaluations, and calls hooks between them.

    A step is ``booster.execute_pipeline``, ``optimizer.step``, ``optimizer.zero_grad``; results are those of a script
    that calls them itself.

    :class:`TrainerState` has what it knows at each moment.

    Args:
        booster: that boosted the parts.
        parts: what ``booster.boost`` returned; without a criterion there is no loss, and nothing can be trained.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> model, data = nn.Linear(2, 1), [(torch.ones(2), torch.ones(1))] * 4
        >>> booster = Booster(device="cpu")
        >>> loader = booster.plugin.prepare_dataloader(data, batch_size=2)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> trainer = Trainer(booster, booster.boost(model, optimizer, nn.MSELoss(), loader))
        >>> trainer.fit(epochs=3)
        >>> trainer.step
        6
    """

    def __init__(self, booster: Booster, parts: Boosted):
        super().__init__(booster, parts)
        self._dataloader = parts.dataloader

    def fit(
        self,
        train_dataloader: Iterable[Any] | None = None,
        epochs: int = 1,
        *,
        test_dataloader: Iterable[Any] | None = None,
        test_interval: int = 1,
        hooks: Sequence[Hook] = (),
        max_steps: int | None = None,
        display_progress: bool = False,
        resume_from: str | Path | None = None,
    ) -> None:
        """Train. Collective: every rank of the world, with the same arguments.

        Args:
            train_dataloader: yields this replica's batches; None: the one that was given to ``boost``.
            epochs: passes over it, those of a resumed run included.
            test_dataloader: to evaluate on; None: there are no evaluations.
            test_interval: epochs from one evaluation to the next; the last epoch has one in any case.
            hooks: see :class:`Hook`. Without a :class:`LossHook` one is added; and without an
                :class:`LRSchedulerHook`, one that steps the ``lr_scheduler`` after each step.
            max_steps: ends the run after this number of steps of training, those of a resumed run included. If the job
                is told to stop (``booster.interrupted``), it ends earlier: hooks save, and a run that resumes goes on.
            display_progress: whether rank 0 shows a progress bar.
            resume_from: folder of the checkpoints of a :class:`SaveCheckpointHook`: the run goes on from the newest
                one, or begins where there is none.

        Raises:
            ConfigError: an argument is wrong, or there is nothing to train.
        """
        loader = self._dataloader if train_dataloader is None else train_dataloader
        self._check(loader, epochs, test_interval, max_steps, hooks)
        require_bools(display_progress=display_progress)
        if test_dataloader is not None:
            check_batches("fit", "test_dataloader", test_dataloader)
        self.hooks = self._with_defaults(hooks, display_progress)
        self.num_epochs, self.should_stop = epochs, False
        self.epoch_to_end = None
        done = Resumed() if resume_from is None else self._resume(resume_from)

        def ends_run() -> bool:
            """Evaluate and call hooks after an epoch, unless the job is told to stop; whether the run ends."""
            is_last = self.epoch == epochs - 1 or self.should_stop or self.step == max_steps
            is_evaluated = test_dataloader is not None and (is_last or (self.epoch + 1) % test_interval == 0)
            if is_evaluated and not self.booster.interrupted:
                self._evaluate(test_dataloader, stops=True)
            if self.booster.interrupted:
                self._stop()
                return True
            self.epoch_to_end = None
            self._call("after_epoch")
            return self.stops_on_any_rank() or self.step == max_steps

        with self._closing():
            self._call("before_fit")
            is_done = max_steps is not None and self.step >= max_steps
            if self.epoch_to_end is not None:  # as the run was told to stop
                self.epoch = self.epoch_to_end
                is_done = ends_run() or is_done
            for self.epoch in range(done.epoch, done.epoch if is_done else epochs):
                is_trained = self._train_epoch(loader, done.batches if self.epoch == done.epoch else 0, max_steps)
                self.epoch_to_end = self.epoch if is_trained else None
                if ends_run():
                    break
            self._call("after_fit")

    def _stop(self) -> None:
        """The job was told to stop: let hooks save."""
        if not any(hook.saves_runs for hook in self.hooks):
            get_dist_logger().warning(
                "the job was told to stop, and no hook saves it: what was trained is lost. Pass a SaveCheckpointHook "
                "to fit.",
                ranks=[0],
            )
        self._call("on_stop")

    @contextmanager
    def _closing(self) -> Iterator[None]:
        try:
            yield
        finally:
            for hook in self.hooks:
                hook.close()

    def evaluate(self, dataloader: Iterable[Any], hooks: Sequence[Hook] = ()) -> dict[str, float]:
        """The metrics of ``hooks``, and the loss if there is a criterion, over all replicas' batches.

        Collective: every rank of the world; the result is the same on all of them.
        """
        check_batches("evaluate", "dataloader", dataloader)
        self._check_hooks(hooks)
        before, self.hooks = self.hooks, self._with_defaults(hooks, display_progress=False)
        # Those of other hooks are of another evaluation.
        self.metrics = {name: value for name, value in self.metrics.items() if not name.startswith("test/")}
        try:
            with self._closing():
                self._evaluate(dataloader)
        finally:
            self.hooks = before
        return {name: value for name, value in self.metrics.items() if name.startswith("test/")}

    def predict(self, dataloader: Iterable[Any], outputs_on: Literal["last", "first", "all"] = "last") -> list[Any]:
        """The model's outputs for each batch of this replica, in order; None on ranks that do not get them.

        Where the replicas do not divide the samples, the last step of some only repeats one; it is left out.

        Collective: every rank of the world.

        Args:
            dataloader: yields this replica's batches.
            outputs_on: as in :meth:`hybridpp.Booster.execute_pipeline`.
        """
        outputs: list[Any] = []

        def step(batches: ReadAheadIterator) -> None:
            result = self.booster.execute_pipeline(
                batches, self.model, return_loss=False, return_outputs=True, outputs_on=outputs_on
            )
            if self.batches.num_samples:  # else they are there only to fill up the step
                outputs.append(result["outputs"])

        with self._evaluating():
            self._for_each_batch(dataloader, step)
        return outputs

    def _resume(self, path: str | Path) -> Resumed:
        done = self.booster.resume(path, missing="fresh")
        self.step = done.step
        state = done.extras.get("trainer", {})
        self.metrics.update(state.get("metrics", {}))
        self.epoch_to_end = state.get("epoch_to_end")
        for name, hook in self.named_hooks():
            hook.load_state_dict(state.get("hooks", {}).get(name, {}))
        return done

    def _train_epoch(self, loader: Any, first_batch: int, max_steps: int | None) -> bool:
        """Train until the end of the epoch, or of the run; whether nothing is left of the epoch but its end."""
        self.model.train()
        self._call("before_epoch")
        wants_outputs = any(hook.needs_train_outputs for hook in self.hooks)

        def step(batches: ReadAheadIterator) -> bool:
            assert self.optimizer is not None
            self.result = self.booster.execute_pipeline(
                batches, self.model, self.criterion, self.optimizer, return_outputs=wants_outputs
            )
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.step += 1
            self._call("after_step")
            return self.should_stop or self.step == max_steps or self.booster.interrupted

        is_over = self._for_each_batch(loader, step, "before_step", first_batch)
        return is_over or self.batches.is_last or self.step == max_steps

    def _evaluate(self, dataloader: Any, *, stops: bool = False) -> None:
        """Evaluate; ``stops``: not to the end, where the job is told to stop."""
        wants_outputs = any(hook.needs_outputs for hook in self.hooks)
        has_loss = self.criterion is not None

        def step(batches: ReadAheadIterator) -> bool:
            self.result = self.booster.execute_pipeline(
                batches, self.model, self.criterion, return_loss=has_loss, return_outputs=wants_outputs
            )
            self._call("after_evaluation_step")
            return stops and self.booster.interrupted

        self._call("before_evaluation")
        with self._evaluating():
            self._for_each_batch(dataloader, step, "before_evaluation_step")
        if not (stops and self.booster.interrupted):
            self._call("after_evaluation")

    @contextmanager
    def _evaluating(self) -> Iterator[None]:
        was_training = self.model.training
        self.model.eval()
        try:
            with torch.no_grad():
                yield
        finally:
            self.model.train(was_training)

    def _for_each_batch(
        self,
        loader: Iterable[Any],
        step: Callable[[ReadAheadIterator], bool | None],
        moment: str | None = None,
        first_batch: int = 0,
    ) -> bool:
        """Call hooks and ``step`` for each batch of ``loader``, until ``step`` returns True; whether it never did."""
        self.batches = Batches(loader, self.booster.plugin.count_samples, first_batch)
        while self.batches.advance():
            if moment is not None and self.batches.batch is not None:
                self._call(moment)
            try:
                if step(self.batches.iterator):
                    return False
            except StopIteration:
                self.batches.num_taken -= 1
                break
        if not self.batches.num_taken:  # as on every rank
            raise DataError(f"the dataloader has no batch: got {type(loader).__name__}. Check its data and filters.")
        return True

    def _call(self, moment: str) -> None:
        for hook in self.hooks:
            getattr(hook, moment)(self)

    def _with_defaults(self, hooks: Sequence[Hook], display_progress: bool) -> list[Hook]:
        added: list[Hook] = []
        if self.criterion is not None and not any(isinstance(hook, LossHook) for hook in hooks):
            added.append(LossHook())
        if self.lr_scheduler is not None and not any(isinstance(hook, LRSchedulerHook) for hook in hooks):
            added.append(LRSchedulerHook(self.lr_scheduler))
        if display_progress:
            added.append(ProgressHook())
        return sorted([*added, *hooks], key=lambda hook: hook.priority)

    def _check_hooks(self, hooks: Sequence[Hook]) -> None:
        if not isinstance(hooks, Sequence) or isinstance(hooks, str):
            raise ConfigError(f"hooks must be a list of hybridpp.trainer.Hook: got hooks={hooks!r:.80}.")
        for hook in hooks:
            if not isinstance(hook, Hook):
                raise ConfigError(f"hooks must be instances of hybridpp.trainer.Hook: got {hook!r:.80}.")

    def _check(
        self, loader: Any, epochs: int, test_interval: int, max_steps: int | None, hooks: Sequence[Hook]
    ) -> None:
        counts = {"epochs": epochs, "test_interval": test_interval, "max_steps": 1 if max_steps is None else max_steps}
        check_intervals(**counts)
        self._check_hooks(hooks)
        missing = [name for name in ("optimizer", "criterion") if getattr(self, name) is None]
        missing += ["dataloader"] * (loader is None)
        if missing:
            raise ConfigError(
                f"fit needs {', '.join(missing)}: got None. Pass them to booster.boost"
                f"{', or train_dataloader to fit' if loader is None else ''}."
            )
        check_batches("fit", "train_dataloader", loader)
