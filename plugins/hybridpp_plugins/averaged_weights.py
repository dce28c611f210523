"""Averages of a boosted model's weights (EMA, SWA, a teacher that follows): in fp32, whatever the model computes in."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

from hybridpp.errors import ConfigError
from hybridpp_plugins.engine import Engine
from hybridpp_plugins.engine_handle import ENGINE
from hybridpp_plugins.gather_update import complete_tensors


class AveragedWeights(AveragedModel):
    """torch's ``AveragedModel`` of a boosted model, whose averages are those of the fp32 weights that are trained.

    It holds all weights of this rank's stages and shards, on every replica. As other copies of a boosted model it does
    not run; ``booster.save_model`` and ``load_model`` take it.

    Args:
        engine: of the model.
        average: ``multi_avg_fn`` of torch's class; None: equal weights.
        use_buffers: whether buffers are averaged, too; else they are copied.

    Raises:
        ConfigError: the model was boosted without an optimizer.
    """

    def __init__(self, engine: Engine, average: Callable[..., Any] | None, use_buffers: bool):
        if engine.optimizer is None:
            raise ConfigError("an average follows a model that is trained: boost the model with its optimizer.")
        engine.tells_of_copies = False
        with engine.weights.unsharded():
            super().__init__(engine.model, multi_avg_fn=average, use_buffers=use_buffers)
        for name, value in self._trained(engine).items():
            self.module.get_parameter(name).data = value.clone()

    @staticmethod
    def _trained(engine: Engine) -> dict[str, Tensor]:
        """The trained weights that have masters, complete, by name. Collective: all replicas, if they divide them."""
        assert engine.optimizer is not None, "it was checked"
        engine.optimizer.target.pull(in_step=True)
        if not engine.weights.in_half:
            return {}
        masters = {name: master.detach() for name, master in engine.masters.masters.items()}
        if engine.weights.flat is not None:
            return complete_tensors(engine, masters)
        return {name: master.to(engine.device) for name, master in masters.items()}

    @torch.no_grad()
    def update_parameters(self, model: nn.Module) -> None:
        """Take the model's weights into the average, as torch's class does. Collective: all replicas, with ZeRO.

        Raises:
            ConfigError: ``model`` is not boosted.
        """
        engine = vars(model).get(ENGINE)
        if not isinstance(engine, Engine) or engine.optimizer is None:
            raise ConfigError(
                f"update_parameters needs the boosted model: got {type(model).__name__}. Pass the model that "
                "booster.boost returned."
            )
        trained = self._trained(engine)
        with engine.weights.unsharded():
            values = [trained.get(name, parameter) for name, parameter in model.named_parameters()]
            source: Any = SimpleNamespace(parameters=lambda: iter(values), buffers=model.buffers)
            super().update_parameters(source)
