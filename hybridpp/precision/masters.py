"""fp32 copies of half-precision weights, which the optimizer works on."""

from collections import defaultdict
from collections.abc import Mapping

import torch
from torch import Tensor, nn


class MasterWeights:
    """An fp32 master for every given parameter.

    Args:
        parameters: in the precision they were made in, before they are cast down.

    Attributes:
        masters: each parameter's master, by name; a leaf that an optimizer can hold.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter]):
        self.masters = {
            name: nn.Parameter(parameter.detach().float().clone(), requires_grad=parameter.requires_grad)
            for name, parameter in parameters.items()
        }
        self._working = dict(parameters)
        self._versions: dict[str, int] = {}
        self._note_versions()

    def _note_versions(self) -> None:
        self._versions = {name: self._working[name]._version for name in self.masters}

    @torch.no_grad()
    def from_working(self) -> None:
        """Take over working weights that were written from outside since the last step (``load_state_dict``, say)."""
        for name, master in self.masters.items():
            if self._working[name]._version != self._versions[name]:
                master.copy_(self._working[name])
        self._note_versions()

    @torch.no_grad()
    def set(self, name: str, value: Tensor) -> None:
        """Give one master a value and round it into its weight."""
        self.masters[name].copy_(value)
        self._working[name].copy_(value)
        self._versions[name] = self._working[name]._version

    @torch.no_grad()
    def to_working(self) -> None:
        """Round the masters into the weights that the model computes with."""
        # One format at a time: given several, torch launches a kernel for every tensor (pytorch #173383).
        pairs: defaultdict[torch.dtype, tuple[list[Tensor], list[Tensor]]] = defaultdict(lambda: ([], []))
        for name, master in self.masters.items():
            targets, sources = pairs[self._working[name].dtype]
            targets.append(self._working[name])
            sources.append(master)
        for targets, sources in pairs.values():
            torch._foreach_copy_(targets, sources)
        self._note_versions()
