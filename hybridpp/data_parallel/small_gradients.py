"""Gradients of small parameters, which are added to their sums together."""

from collections import defaultdict
from collections.abc import Collection, Mapping

import torch
from torch import Tensor

from hybridpp.nn.torch_private import foreach_add_, foreach_copy_

# Elements: the norms and biases of large models. A gradient that waits takes memory, at most as much as its parameter.
_MAX_SMALL = 2**16


class SmallGradients:
    """Gradients that wait to be added to their sums, in a few kernels instead of one for each.

    Args:
        views: the sums, by parameter name; large ones are left out.

    Attributes:
        views: those of small parameters.
    """

    def __init__(self, views: Mapping[str, Tensor]):
        self.views = {name: view for name, view in views.items() if view.numel() <= _MAX_SMALL}
        self._waiting: dict[str, Tensor] = {}
        # Where gradients are converted to the sums' format.
        self._converted: dict[str, Tensor] = {}

    def __len__(self) -> int:
        """The number of gradients that wait."""
        return len(self._waiting)

    def has(self, name: str) -> bool:
        """Whether a gradient of the parameter ``name`` waits."""
        return name in self._waiting

    def collect(self, name: str, gradient: Tensor) -> None:
        """Let a gradient wait, of a parameter of which none does."""
        self._waiting[name] = gradient

    def clear(self) -> None:
        """Drop what waits."""
        self._waiting.clear()

    def take(self, names: Collection[str] | None) -> dict[str, Tensor]:
        """What waits of the parameters ``names`` (None: of all), which waits no more."""
        taken = {name: self._waiting[name] for name in (self._waiting if names is None else names) if self.has(name)}
        for name in taken:
            del self._waiting[name]
        return taken

    def add(self, gradients: Mapping[str, Tensor], overwritten: Collection[str]) -> None:
        """Add to the sums, by name.

        Args:
            gradients: by name.
            overwritten: parameters whose sums hold old values, which the gradients replace.
        """
        groups: dict[tuple[bool, torch.dtype], list[str]] = defaultdict(list)
        for name, gradient in gradients.items():
            groups[name in overwritten, gradient.dtype].append(name)
        for (is_first, _), names in groups.items():
            views, parts = [self.views[name] for name in names], [gradients[name] for name in names]
            if is_first:
                foreach_copy_(views, parts)
            else:
                foreach_add_(views, self._as_sums(names, parts))

    def _as_sums(self, names: list[str], parts: list[Tensor]) -> list[Tensor]:
        """The gradients in the format of the sums, where torch adds lists of one format only in one kernel."""
        first = self.views[names[0]]
        if first.dtype is parts[0].dtype or first.device.type == "cpu":
            return parts
        for name in names:
            if name not in self._converted:
                self._converted[name] = torch.empty_like(self.views[name])
        converted = [self._converted[name] for name in names]
        foreach_copy_(converted, parts)
        return converted
