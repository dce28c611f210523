"""Which weights of a model that was boosted on the meta device still wait for ``load_model``."""

from collections.abc import Iterable

from torch import nn
from torch.utils.hooks import RemovableHandle

from hybridpp.errors import ConfigError


class Unfilled:
    """Names of the whole model's weights, this rank's or not: every rank has the same ones, so all fail or none."""

    def __init__(self, names: Iterable[str]):
        self._names = set(names)
        self._loaded = False
        self._hook: RemovableHandle | None = None

    def watch(self, model: nn.Module) -> None:
        """Refuse calls of the model too, while weights are not there."""
        if self._names:
            self._hook = model.register_forward_pre_hook(self._before_forward)

    def _before_forward(self, *_: object) -> None:
        self.check()

    def fill(self, names: Iterable[str]) -> None:
        """Take note of what a folder held."""
        self._names -= set(names)
        self._loaded = True
        if not self._names and self._hook is not None:
            self._hook.remove()

    def check(self) -> None:
        """Refuse to use weights that are not there.

        Raises:
            ConfigError: some are not.
        """
        if not self._names:
            return
        if not self._loaded:
            raise ConfigError(
                "the model was boosted on the meta device and has no weights yet: call booster.load_model(model, "
                "folder) first."
            )
        raise ConfigError(
            f"the folder that was loaded lacks weights, and the model was boosted on the meta device, so they have no "
            f"values: {sorted(self._names)}. Call booster.load_model(model, folder) with a folder that holds them, or "
            "boost a model that has weights."
        )
