"""A wrapper of an optimizer whose state dict also records its rank, its layout and the run's progress."""

from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch.optim import Optimizer

from hybridpp.cluster import Group, get_dist_logger
from hybridpp.errors import ConfigError
from hybridpp.precision import LossScale, LossScaler, MasterWeights
from hybridpp_plugins.optimizer_state import OptimizerStateOwner, RunProgress, StepCounts, check_on_all_ranks, pack


class WrappedOptimizer(Optimizer):
    """An optimizer with the wrapped optimizer's groups, state, hooks and other attributes.

    Args:
        optimizer: the one that was given to ``boost``.
        masters: of the weights that it updates.
        loss_scaler: counts skipped steps.
        owner: the rank that the state belongs to.
        control: all ranks of the world.

    Attributes:
        applied_steps: steps that were taken.
        loss_scaler: as given.
        owner: as given.
        progress: of the run; the engine counts in it.
        resumed_at: the step counts of the last ``load_state_dict``; None before one.
        on_release: puts back what boost changed of the wrapped optimizer's settings.
        holds_gradients: whether this rank has gradients of a backward pass since the last step or ``zero_grad``.
    """

    holds_gradients: bool

    def __init__(
        self,
        optimizer: Optimizer,
        masters: MasterWeights,
        loss_scaler: LossScaler,
        owner: OptimizerStateOwner,
        control: Group,
    ):
        # No call to the base class, which would create its own groups and state.
        self._optimizer = optimizer
        self._masters = masters
        self._control = control
        self._is_released = False
        self.on_release: Callable[[], None] = lambda: None
        self.applied_steps = 0
        self.loss_scaler = loss_scaler
        self.owner = owner
        self.progress = RunProgress()
        self.resumed_at: StepCounts | None = None

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]  # an attribute in the base class
        """The wrapped optimizer's groups."""
        return self._optimizer.param_groups

    @property
    def state(self) -> Any:  # type: ignore[override]  # an attribute in the base class
        """The wrapped optimizer's state."""
        return self._optimizer.state

    @property
    def defaults(self) -> dict[str, Any]:  # type: ignore[override]  # an attribute in the base class
        """The wrapped optimizer's defaults."""
        return self._optimizer.defaults

    def unwrap(self) -> Optimizer:
        """The optimizer that was given to ``boost``."""
        return self._optimizer

    @property
    def is_released(self) -> bool:
        """Whether the model is unboosted."""
        return self._is_released

    def release(self) -> None:
        """Refuse to be used from now on: the model is unboosted, and the wrapped optimizer updates it."""
        self._is_released = True
        self.on_release()

    def _refuse_released(self) -> NoReturn:
        raise ConfigError(
            "the model of this optimizer was unboosted. Call optimizer.unwrap(), which gives the optimizer of the "
            "plain model."
        )

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Not supported: parameters are assigned to ranks at boost."""
        raise ConfigError("parameter groups must be added before booster.boost. Add this one to the optimizer first.")

    def __getattr__(self, name: str) -> Any:
        # Hooks, and other attributes of the wrapped optimizer.
        if name == "_optimizer":
            raise AttributeError(name)
        return getattr(self._optimizer, name)

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise ConfigError("a boosted optimizer cannot be copied or pickled. Use its state_dict().")

    @property
    def skipped_steps(self) -> int:
        """Number of steps skipped because a gradient was inf or NaN (fp16, or ``error_if_nonfinite=False``)."""
        return self.loss_scaler.skipped_steps

    @property
    def last_step_skipped(self) -> bool:
        """Whether the last step was skipped."""
        return self.loss_scaler.last_step_skipped

    def state_dict(self) -> dict[str, Any]:
        """This rank's state to resume a run, in addition to the model's weights. It differs between ranks.

        With ``zero_stage`` it is the part that this replica updates, with tensor parallelism that of its shards.
        Nothing is communicated. ``booster.save_optimizer`` writes the complete state, by names, for any layout.

        It contains, by the names of parameters, the optimizer state (``["optimizer"]["state"][name]``), masters, loss
        scale, step counts and the seed of dropout. Weights without masters (in fp32, or frozen) are saved by
        ``booster.save_model``. Call it between steps: accumulated gradients are not included.
        """
        if self.holds_gradients:
            get_dist_logger().warning(
                "state_dict was called between backward and step: it does not contain the accumulated gradients, so a "
                "resumed run would lack them. Call it after optimizer.step().",
                ranks=[0],
            )
        self._masters.copy_from_model()
        masters = {} if self._masters.are_copies else self._masters.masters
        return {
            "optimizer": self.owner.by_name(self._optimizer.state_dict()),
            "loss_scale": vars(self.loss_scaler.state).copy(),
            "masters": {name: master.detach() for name, master in masters.items()},
            **pack(self.owner, self.counts, self.progress),
        }

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Resume from a ``state_dict`` of the same rank of the same layout (the number of replicas may differ).

        Weights stay as they are. In half precision, the saved fp32 copies are taken where weights are these, rounded,
        now or once they are loaded, before the next step. Accumulated gradients are dropped. As in torch, tensors of
        ``state_dict`` that need no conversion are used, not copied: pass a copy if it is to be loaded again.

        Collective: all ranks.

        Raises:
            ConfigError: the state belongs to another rank, layout or precision; on every rank, and nothing is changed.
        """
        moment = check_on_all_ranks(self.owner, state_dict, self._control)
        self.zero_grad()
        self._optimizer.load_state_dict(self.owner.by_number(state_dict["optimizer"]))
        self.loss_scaler.state = LossScale(**state_dict["loss_scale"])
        if self._masters.are_copies:
            self._masters.copy_from_model()
        else:
            self._masters.take_saved(state_dict["masters"])
        if moment is None:
            get_dist_logger().warning(
                "this optimizer state was saved by an older version, without the run's progress and without its rank: "
                "dropout uses the random numbers of a new run, steps are counted from 0, and the rank is not checked.",
                ranks=[0],
            )
            return
        counts, progress = moment
        self.set_counts(counts)
        vars(self.progress).update(vars(progress))

    def set_counts(self, counts: StepCounts) -> None:
        """Go on counting after the steps of a state that was loaded."""
        self.applied_steps, self.loss_scaler.skipped_steps = counts.applied, counts.skipped
        self.loss_scaler.last_step_skipped = counts.last_skipped
        self.resumed_at = counts

    @property
    def counts(self) -> StepCounts:
        """The steps so far."""
        return StepCounts(self.applied_steps, self.skipped_steps, self.last_step_skipped)
