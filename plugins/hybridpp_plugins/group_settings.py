"""What the script may change of an optimizer between steps, on all ranks alike: a number says whether it did."""

import zlib
from collections.abc import Iterable, Sequence
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from hybridpp.cluster import Group, gather_objects
from hybridpp.errors import UnequalRanksError
from hybridpp_plugins.set_alike import Facts, differences, group_facts, listed

# What a group holds of this rank alone: its parameters, and the kernels for the device that these are on.
_OF_THE_RANK = frozenset({"params", "param_names", "fused", "foreach", "capturable"})
_PLAIN = frozenset({type(None), bool, int, float, str})


class GroupSettings:
    """Learning rates and all other settings of an optimizer's groups, and whether the model is in training mode.

    A digest of them is part of messages that ranks send anyway; it takes microseconds, and no wait for a device.

    Args:
        optimizer: that updates the weights.
        model: the user's.
        control: all ranks.
    """

    def __init__(self, optimizer: Optimizer, model: nn.Module, control: Group):
        self._optimizer, self._model, self._control = optimizer, model, control

    def on_device(self) -> list[Tensor]:
        """Settings that are tensors on a device, as vectors of float64 there: rates for CUDA graphs, for example.

        The caller reads them with other numbers, and gives them to :meth:`digest`.
        """
        return [
            one.detach().reshape(-1).double()
            for value in self._values()
            for one in (value if isinstance(value, tuple | list) else (value,))
            if isinstance(one, Tensor) and not one.is_cpu
        ]

    def digest(self, on_device: Sequence[float] = ()) -> float:
        """A number that is equal on all ranks whose settings are; ``on_device``: what was read of :meth:`on_device`."""
        held = [_plain(value) for value in self._values()]
        return float(zlib.crc32(repr((self._model.training, held, on_device)).encode()))

    def _values(self) -> Iterable[Any]:
        for group in self._optimizer.param_groups:
            for key, value in group.items():
                if key not in _OF_THE_RANK:
                    yield value

    def facts(self) -> Facts:
        """The settings as texts."""
        groups = enumerate(self._optimizer.param_groups)
        facts = {
            f"parameter group {index}": {
                key: text for key, text in group_facts(group).items() if key not in _OF_THE_RANK
            }
            for index, group in groups
        }
        return {**facts, "the model": {"training": repr(self._model.training)}}

    def check(self, digests: Sequence[float], call: str, consequence: str) -> None:
        """Refuse settings that differ between ranks. Collective, if the digests differ: all ranks.

        Args:
            digests: by rank.
            call: that this rank is in, see :mod:`hybridpp.cluster.gather_numbers`.
            consequence: a sentence on what has happened to the weights.

        Raises:
            UnequalRanksError: they differ; on every rank, with the group, the setting, its values and the ranks.
        """
        if len(set(digests)) == 1:
            return
        clauses = differences(gather_objects(self._control, call, self.facts()))
        if clauses:
            raise UnequalRanksError(
                f"all ranks must update with the same settings: {listed(clauses)}. {consequence} Change settings on "
                "all ranks alike. A schedule that follows a loss (ReduceLROnPlateau) needs the same one everywhere: "
                "average it over the replicas first, with torch.distributed.all_reduce."
            )


def _plain(value: Any) -> Any:
    """What of a value is compared; an object by its class."""
    kind = type(value)
    if kind in _PLAIN:
        return value
    if isinstance(value, tuple | list):
        return [_plain(one) for one in value]
    if isinstance(value, Tensor):
        return value.tolist() if value.is_cpu else kind.__name__
    return float(value) if isinstance(value, float | int) else kind.__name__
