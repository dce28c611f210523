"""What a training loop knows, and hooks read."""

from collections.abc import Mapping
from typing import Any

from hybridpp.booster import Booster
from hybridpp.cluster import DistCoordinator, current_world, gather_numbers
from hybridpp.errors import ConfigError
from hybridpp.plugin import Boosted
from hybridpp.trainer.batches import Batches


class TrainerState:
    """The state of a :class:`~hybridpp.trainer.Trainer`.

    Attributes:
        booster, model, optimizer, criterion, lr_scheduler: as given.
        coordinator: this rank's position.
        epoch: number of the epoch, from 0.
        num_epochs: of the run.
        step: number of steps of training that are done.
        batches: of the pass that runs or ran last, with this replica's present ``batch`` and its ``num_samples``.
        result: of the last ``execute_pipeline``.
        hooks: in the order of their calls.
        metrics: latest value of each metric over all replicas, by name: ``"train/loss"``, ``"test/accuracy"``.
        epoch_to_end: an epoch whose steps are done, and whose evaluation and end are not; a stopped run goes on there.
        should_stop: set by a hook to end the run after this epoch, on any rank; or on every rank during a step, to end
            it after this step.
    """

    batches: Batches

    def __init__(self, booster: Booster, parts: Boosted):
        if not isinstance(booster, Booster) or not isinstance(parts, Boosted):
            raise ConfigError(
                "Trainer takes a booster and what its boost returned: got "
                f"{type(booster).__name__} and {type(parts).__name__}. Write Trainer(booster, booster.boost(...))."
            )
        self.booster, self.coordinator = booster, DistCoordinator()
        self.model, self.optimizer, self.criterion, _, self.lr_scheduler = parts
        self.epoch, self.num_epochs, self.step = 0, 0, 0
        self.result: Mapping[str, Any] = {}
        self.metrics: dict[str, float] = {}
        self.should_stop = False
        self.epoch_to_end: int | None = None
        self.hooks: list[Any] = []

    def metric(self, name: str) -> float:
        """The latest value of a metric.

        Raises:
            ConfigError: there is none of that name.
        """
        if name not in self.metrics:
            raise ConfigError(f"there is no metric {name!r} yet. There are: {', '.join(self.metrics) or 'none'}.")
        return self.metrics[name]

    def step_values(self) -> dict[str, float]:
        """The loss of this replica's last batch, and the learning rate of each parameter group."""
        assert self.optimizer is not None
        rates = list(dict.fromkeys(float(group["lr"]) for group in self.optimizer.param_groups))
        names = ["lr"] if len(rates) == 1 else [f"lr_{index}" for index in range(len(rates))]
        return {"loss": float(self.result["loss"]), **dict(zip(names, rates, strict=True))}

    def sum_over_replicas(self, *numbers: float) -> list[float]:
        """The sums of numbers of the replicas, each read from one of its ranks that have the outputs.

        Collective: every rank of the world.
        """
        own = [float(self.booster.plugin.holds_results), *numbers]
        rows = gather_numbers(current_world().control(), "in a metric of Trainer", own)
        return [sum(column) for column in zip(*(row[1:] for row in rows if row[0]), strict=True)]

    def stops_on_any_rank(self) -> bool:
        """Whether a hook set ``should_stop``, on whatever rank. Collective: every rank of the world."""
        rows = gather_numbers(current_world().control(), "at the end of an epoch of Trainer", [float(self.should_stop)])
        self.should_stop = any(row[0] for row in rows)
        return self.should_stop

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint keeps of the loop and its hooks, beside what ``booster.save`` writes."""
        hooks = {name: hook.state_dict() for name, hook in self.named_hooks()}
        return {"hooks": hooks, "metrics": dict(self.metrics), "epoch_to_end": self.epoch_to_end}

    def named_hooks(self) -> list[tuple[str, Any]]:
        """Each hook with its class, numbered where there are several of one."""
        names = [type(hook).__name__ for hook in self.hooks]
        return [(f"{name}-{names[:index].count(name)}", self.hooks[index]) for index, name in enumerate(names)]
