"""Give the plain model back, as before boost, with its trained weights."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from hybridpp.checkpoint import without_flat_weights
from hybridpp.data_parallel import give_memory
from hybridpp.errors import ConfigError
from hybridpp_plugins.engine import Engine
from hybridpp_plugins.gather_update import CompleteUpdate, gather_update
from hybridpp_plugins.wrap_optimizer import restore_optimizer


def unboost(engine: Engine) -> None:
    """Take everything off a boosted model of which each rank has all layers.

    Weights have the values that the optimizer works on (the fp32 masters, rounded to the dtype before boost), on the
    device of boost. Gradients are forgotten. The optimizer that was given to boost works on the model's parameters
    again, with its state.

    Collective: all replicas, if they divide weights or the optimizer among themselves; else nothing is communicated.

    Raises:
        ConfigError: ranks hold parts of layers or some of them, or the script has replaced something that boost put
            there.
    """
    grid, model = engine.layout.grid, engine.model
    if grid.tp_size > 1 or grid.pp_size > 1:
        raise ConfigError(
            f"unboost needs the unsharded model on one rank: got tp_size={grid.tp_size}, pp_size={grid.pp_size}. Call "
            "booster.save_model, and load the folder into a new model."
        )
    update = _update_of(engine)
    with engine.weights.internal():
        parameters = dict(model.named_parameters())
    if engine.weights.flat is not None:
        _take_out(model, parameters, update.weights)
    if engine.optimizer is not None:
        restore_optimizer(engine.optimizer, parameters, update.state)
        engine.optimizer.release()
    engine.adapter.remove()
    with torch.no_grad():
        for name, value in update.weights.items() if engine.weights.in_half else ():
            parameters[name].copy_(value)


def _update_of(engine: Engine) -> CompleteUpdate:
    boosted = engine.optimizer
    if engine.weights.flat is not None:
        assert boosted is not None, "replicas divide what an optimizer updates"
        return gather_update(engine, boosted)
    engine.adapter.check_removable()
    state: dict[str, dict[str, Any]] = {}
    if boosted is None:
        engine.masters.copy_from_model()
    else:
        boosted.target.pull()
        held = boosted.unwrap().state
        state = {name: held[tensor] for name, tensor in boosted.target.tensors.items() if tensor in held}
    return CompleteUpdate({name: master.detach() for name, master in engine.masters.masters.items()}, state)


def _take_out(model: nn.Module, parameters: Mapping[str, nn.Parameter], values: Mapping[str, Tensor]) -> None:
    """Let parameters that lie in buffers, or have no values, have memory of their own."""
    recurrent = [module for module in model.modules() if isinstance(module, nn.RNNBase)]
    with torch.no_grad(), without_flat_weights(recurrent):
        for name, value in values.items():
            give_memory(parameters[name], value.to(parameters[name].dtype, copy=True))
