"""An optimizer's groups and state by the names of parameters, so that any layout can load them."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from hybridpp.checkpoint.manifest import TensorEntry
from hybridpp.checkpoint.plain_values import decode, encode
from hybridpp.checkpoint.writer import Holding
from hybridpp.errors import CheckpointError
from hybridpp.optim import optimizer_name
from hybridpp_plugins.rank_shares import RankShares
from hybridpp_plugins.stored_values import check_settings, is_count

# How steps are computed, which is the run's own choice and not what it computes.
_IMPLEMENTATION = ("fused", "foreach", "capturable", "differentiable")
_NO_SETTINGS = ("params", "param_names", *_IMPLEMENTATION)
# A tensor of the parameter's shape; another tensor, which belongs to all of the parameter; anything else.
_LIKE, _FULL, _VALUE = "like", "full", "value"


class OptimizerByName:
    """An optimizer whose tensors have names.

    Args:
        optimizer: the user's, on what this rank updates.
        updated: that, by name: parameters, masters, or pieces of them.
        shares: says what of the full tensors they are.
        prefix: of the keys of its tensors in the checkpoint.
    """

    def __init__(self, optimizer: Optimizer, updated: Mapping[str, nn.Parameter], shares: RankShares, prefix: str):
        self._optimizer, self._shares, self._prefix = optimizer, shares, prefix
        names = {id(tensor): name for name, tensor in updated.items()}
        self._groups = [[(names[id(p)], p) for p in group["params"]] for group in optimizer.param_groups]

    @property
    def kind(self) -> str:
        """The class of the optimizer."""
        return optimizer_name(self._optimizer)

    @property
    def group_names(self) -> list[list[str]]:
        """The names of each group's parameters on this rank."""
        return [[name for name, _ in group] for group in self._groups]

    def settings(self) -> list[dict[str, Any]]:
        """The settings of each group, as JSON; the same on every rank.

        Raises:
            ConfigError: a setting is an object.
        """
        return [
            {
                key: encode(value, f"optimizer.param_groups[{index}][{key!r}]")
                for key, value in group.items()
                if key not in _NO_SETTINGS
            }
            for index, group in enumerate(self._optimizer.param_groups)
        ]

    def _key(self, name: str, key: str) -> str:
        return f"{self._prefix}{name}/{key}"

    def described_state(self) -> dict[str, dict[str, Any]]:
        """By name, what each entry of the state is, with the value of those that are no tensors of the parameter.

        Raises:
            CheckpointError: an entry cannot be put together from the ranks' parts.
            ConfigError: an entry is an object.
        """
        return {
            name: {
                key: self._described(name, key, tensor, value) for key, value in self._optimizer.state[tensor].items()
            }
            for name, tensor in self._with_state()
        }

    def _with_state(self) -> Iterable[tuple[str, nn.Parameter]]:
        return [pair for group in self._groups for pair in group if self._optimizer.state.get(pair[1])]

    def _described(self, name: str, key: str, tensor: Tensor, value: Any) -> list[Any]:
        if not isinstance(value, Tensor) or (value.dim() == 0 and tensor.dim() > 0):
            return [_VALUE, encode(value, f"optimizer.state[{name!r}][{key!r}]")]
        if value.shape == tensor.shape:
            return [_LIKE]
        if not self._shares.has_all(name):
            raise CheckpointError(
                f"{self.kind} keeps {key!r} of shape {tuple(value.shape)} for {name}, of which this rank updates a "
                "part. A checkpoint can hold it only where a rank updates the complete parameter: use tp_size=1 and "
                "zero_stage=0."
            )
        return [_FULL]

    def holdings(self) -> list[Holding]:
        """The tensors of the state that this rank writes."""
        found = []
        for name, tensor in self._with_state():
            for key, value in self._optimizer.state[tensor].items():
                (kind, *_) = self._described(name, key, tensor, value)
                if kind == _LIKE:
                    shape = self._shares.full_shape(name, tensor)
                    parts = self._shares.parts(name, value, to_write=True)
                    found.append(Holding(self._key(name, key), value.dtype, shape, parts))
                elif kind == _FULL and self._shares.writes(name):
                    found.append(Holding.of_all(self._key(name, key), value))
        return found

    def check(self, stored: Mapping[str, Any], names_of_all_ranks: Sequence[Sequence[str]]) -> None:
        """Compare what is stored with the optimizer of the complete model.

        Raises:
            CheckpointError: another optimizer, or other groups.
        """
        if stored["class"] is None:
            self._check_settings(stored["settings"])
        elif stored["class"] != self.kind:
            raise CheckpointError(f"the state of {stored['class']} cannot be loaded into {self.kind}. Use the same one")
        there = [set(group["names"]) for group in stored["groups"]]
        if len(there) != len(names_of_all_ranks):
            raise CheckpointError(
                f"the optimizer had {len(there)} parameter groups, and has {len(names_of_all_ranks)} here. Make the "
                "same groups"
            )
        for index, settings in enumerate(stored["settings"]):
            check_settings(self._optimizer, index, _decoded(settings))
        for index, (saved, here) in enumerate(zip(there, names_of_all_ranks, strict=True)):
            if different := sorted(saved ^ set(here)):
                where = "there" if different[0] in saved else "here"
                raise CheckpointError(
                    f"{different[0]} is in group {index} of the optimizer {where} only. Make the same groups"
                )

    def _check_settings(self, stored: Sequence[Mapping[str, Any]]) -> None:
        """Refuse the state of another class, if its name is not known."""
        for group, saved in zip(self._optimizer.param_groups, stored, strict=False):
            if unknown := sorted(set(saved) - set(group)):
                raise CheckpointError(
                    f"the state of an optimizer with {', '.join(unknown)} cannot be loaded into {self.kind}. Use the "
                    "same one"
                )

    def planned_state(
        self, described: Mapping[str, Mapping[str, Any]], tensors: Mapping[str, TensorEntry]
    ) -> tuple[dict[str, dict[str, Any]], list[Holding]]:
        """New tensors for the stored state of what this rank updates, and what fills them.

        Returns:
            The state by name, with tensors of zeros, and where their values are stored.

        Raises:
            CheckpointError: an entry cannot be divided as the parameter is here.
        """
        state: dict[str, dict[str, Any]] = {}
        holdings: list[Holding] = []
        for name, tensor in (pair for group in self._groups for pair in group if pair[0] in described):
            state[name] = {}
            for key, (kind, *value) in described[name].items():
                state[name][key] = decode(value[0]) if kind == _VALUE else self._made(name, tensor, key, kind, tensors)
                if key == "step" and kind == _VALUE and not is_count(state[name][key]):
                    raise CheckpointError(
                        f"the state of {name!r:.120} has {key!r} = {state[name][key]!r:.80}, which is no number of "
                        "steps. Restore the files from a copy"
                    )
                if kind == _LIKE:
                    made = state[name][key]
                    shape, parts = self._shares.full_shape(name, tensor), self._shares.parts(name, made)
                    if sum(box.size for box, _ in parts) < made.numel():
                        made.zero_()  # there is padding, which is not read
                    holdings.append(Holding(self._key(name, key), made.dtype, shape, parts))
                elif kind == _FULL:
                    holdings.append(Holding.of_all(self._key(name, key), state[name][key]))
        return state, holdings

    def _made(self, name: str, tensor: Tensor, key: str, kind: str, tensors: Mapping[str, TensorEntry]) -> Tensor:
        entry = tensors.get(self._key(name, key))
        if entry is None:
            raise CheckpointError(f"{self._key(name, key)} is missing")
        dtype = getattr(torch, entry.dtype)
        if kind == _LIKE:
            return torch.empty_like(tensor, dtype=dtype, requires_grad=False)
        if not self._shares.has_all(name):
            raise CheckpointError(
                f"the state {key!r} of {name} belongs to the complete parameter, of which this rank updates a part. "
                "Use tp_size=1 and zero_stage=0"
            )
        return torch.zeros(entry.shape, dtype=dtype, device=tensor.device)

    def load(self, settings: Sequence[Mapping[str, Any]], state: Mapping[str, Mapping[str, Any]]) -> None:
        """Set the settings of the groups, and the state by name. Tensors of ``state`` may be used, not copied."""
        packed: dict[str, Any] = {"state": {}, "param_groups": []}
        for group, saved, names in zip(self._optimizer.param_groups, settings, self.group_names, strict=True):
            first = sum(len(done["params"]) for done in packed["param_groups"])
            numbers = list(range(first, first + len(names)))
            own = {key: value for key, value in group.items() if key != "params"}
            packed["param_groups"].append({**own, **_decoded(saved), "params": numbers})
            packed["state"] |= {n: dict(state[name]) for n, name in zip(numbers, names, strict=True) if name in state}
        self._optimizer.load_state_dict(packed)


def _decoded(settings: Mapping[str, Any]) -> dict[str, Any]:
    return {key: decode(value) for key, value in settings.items() if key not in _NO_SETTINGS}


def merged_groups(rows: Iterable[Sequence[Sequence[str]]]) -> list[list[str]]:
    """The names of each group's parameters in the complete model, from those on each rank."""
    merged: list[dict[str, None]] = []
    for row in rows:
        merged += [{} for _ in range(len(row) - len(merged))]
        for names, own in zip(merged, row, strict=True):
            names |= dict.fromkeys(own)
    return [list(names) for names in merged]
