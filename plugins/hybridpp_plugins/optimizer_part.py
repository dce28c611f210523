"""One model's optimizer as a checkpoint has it: its state by name, loss scale, counts, and what it updates."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from torch import nn

from hybridpp.checkpoint.manifest import TensorEntry
from hybridpp.checkpoint.writer import Holding
from hybridpp.errors import ConfigError
from hybridpp.precision import LossScale
from hybridpp_plugins.engine import Engine
from hybridpp_plugins.optimizer import HybridOptimizer
from hybridpp_plugins.optimizer_by_name import OptimizerByName, merged_groups
from hybridpp_plugins.optimizer_state import StepCounts
from hybridpp_plugins.rank_shares import RankShares

# What a schedule sets of a group.
_RATES = ("lr", "initial_lr")


class OptimizerPart:
    """The optimizer of a boosted model in a checkpoint.

    Args:
        engine: of the model.
        boosted: its optimizer.
        shares: says what of the full tensors this rank has.
        prefix: of the model's keys.
    """

    def __init__(self, engine: Engine, boosted: HybridOptimizer, shares: RankShares, prefix: str):
        self._boosted = boosted
        frozen = {n: p for n, p in engine.model.named_parameters() if n not in engine.weights.parameters}
        updated: dict[str, nn.Parameter] = frozen | dict(boosted.target.tensors)
        self._by_name = OptimizerByName(boosted.unwrap(), updated, shares, f"{prefix}optimizer/")

    @property
    def group_names(self) -> list[list[str]]:
        """The names of the parameters of each group on this rank."""
        return self._by_name.group_names

    def check_can_save(self, call: str) -> None:
        """Refuse a moment at which a checkpoint would lack something.

        Raises:
            ConfigError: gradients are held.
        """
        if self._boosted.holds_gradients:
            raise ConfigError(
                f"{call} was called between backward and step: the checkpoint would lack the accumulated gradients. "
                "Call it after optimizer.step() or optimizer.zero_grad()."
            )

    def holdings(self) -> list[Holding]:
        """The tensors of the state that this rank writes.

        Raises:
            CheckpointError: see :meth:`OptimizerByName.described_state`.
        """
        return self._by_name.holdings()

    def described(self) -> dict[str, Any]:
        """Everything but tensors, as JSON.

        Raises:
            CheckpointError: see :meth:`OptimizerByName.described_state`.
            ConfigError: the state holds an object.
        """
        scaler = self._boosted.loss_scaler
        return {
            "class": self._by_name.kind,
            "names": self._by_name.group_names,
            "settings": self._by_name.settings(),
            "state": self._by_name.described_state(),
            "counts": asdict(self._boosted.counts),
            "loss_scale": vars(scaler.state).copy() if scaler.is_active else None,
        }

    def plan(
        self, saved: Mapping[str, Any], tensors: Mapping[str, TensorEntry], names_of_all_ranks: Sequence[Any]
    ) -> tuple[dict[str, dict[str, Any]], list[Holding]]:
        """New tensors for what is stored, and what fills them; see :meth:`OptimizerByName.planned_state`.

        Args:
            saved: what :func:`merged_optimizer` returned.
            tensors: of the checkpoint.
            names_of_all_ranks: by rank, the names of :attr:`group_names`.

        Raises:
            CheckpointError: it does not fit.
        """
        self._by_name.check(saved, merged_groups(names_of_all_ranks))
        return self._by_name.planned_state(saved["state"], tensors)

    def load(
        self, saved: Mapping[str, Any], state: Mapping[str, Mapping[str, Any]], *, keeps_rates: bool = False
    ) -> None:
        """Go on from a state whose tensors, and the weights, were read. Collective: all replicas.

        Args:
            saved: what :func:`merged_optimizer` returned.
            state: by name.
            keeps_rates: keep the learning rates of the groups, which another schedule has set.
        """
        boosted = self._boosted
        boosted.zero_grad()
        rates = [{key: group[key] for key in _RATES if key in group} for group in boosted.param_groups]
        self._by_name.load(saved["settings"], state)
        if keeps_rates:
            for group, kept in zip(boosted.param_groups, rates, strict=True):
                group.update(kept)
        boosted.set_counts(StepCounts(**saved["counts"]))
        if saved["loss_scale"] is not None and boosted.loss_scaler.is_active:
            boosted.loss_scaler.state = LossScale(**saved["loss_scale"])
        boosted.target.push()

    def start_anew(self) -> None:
        """Begin without state, from weights that were read. Collective: all replicas."""
        self._boosted.zero_grad()
        self._boosted.unwrap().state.clear()
        self._boosted.set_counts(StepCounts())
        self._boosted.target.push()


def merged_optimizer(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """One optimizer, from what each rank described of it, by rank."""
    groups = merged_groups(row["names"] for row in rows)
    state: dict[str, Any] = {}
    for row in reversed(rows):
        state |= row["state"]
    kept = {key: value for key, value in rows[0].items() if key != "names"}
    return {**kept, "groups": [{"names": names} for names in groups], "state": state}
