"""Give the plain model back, as before boost, with its trained weights."""

import torch

from hybridpp.errors import ConfigError
from hybridpp_plugins.engine import Engine
from hybridpp_plugins.wrap_optimizer import restore_optimizer


def unboost(engine: Engine) -> None:
    """Take everything off a boosted model that each rank holds completely; nothing is communicated.

    Weights have the values that the optimizer works on (the fp32 masters, rounded to the dtype before boost), on the
    device of boost. Gradients are forgotten. The optimizer that was given to boost works on the model's parameters
    again, with its state.

    Raises:
        ConfigError: ranks hold parts of the model, or the script has replaced something that boost put there.
    """
    grid, model = engine.layout.grid, engine.model
    if grid.tp_size > 1 or grid.pp_size > 1:
        raise ConfigError(
            f"unboost needs the unsharded model on one rank: got tp_size={grid.tp_size}, pp_size={grid.pp_size}. Call "
            "booster.save_model, and load the folder into a new model."
        )
    if engine.weights.flat is not None:
        raise ConfigError(
            f"unboost needs the complete optimizer state on one rank: got zero_stage={engine.zero_stage} with "
            f"{grid.dp_size} replicas, which divide it among themselves. Call booster.save_model, and load the folder "
            "into a new model."
        )
    engine.adapter.check_removable()
    engine.masters.copy_from_model()
    parameters = dict(model.named_parameters())
    if engine.optimizer is not None:
        restore_optimizer(engine.optimizer.unwrap(), engine.masters, parameters)
        engine.optimizer.release()
    engine.adapter.remove()
    with torch.no_grad():
        for name, master in engine.masters.masters.items():
            parameters[name].copy_(master)
