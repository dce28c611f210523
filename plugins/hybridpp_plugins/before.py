"""What ``boost`` is given, before anything is done to it: noted, and checked."""

import zlib
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from hybridpp.cluster import Group
from hybridpp.errors import ConfigError
from hybridpp_plugins.optimizer import HybridOptimizer
from hybridpp_plugins.unfilled import Unfilled

# Elements of each parameter that are compared between ranks: enough to see two initialisations apart.
_NUM_COMPARED = 16


class Before(NamedTuple):
    """What a model was before anything was done to it.

    Attributes:
        names: of the parameters, by ``id``; the first one where there are several.
        aliases: the others, each with the first.
        dtypes: of everything in the state.
        model_dtype: of the first floating-point parameter.
        unfilled: what has no numbers yet.
        buffer_names: persistent buffers.
    """

    names: dict[int, str]
    aliases: dict[str, str]
    dtypes: dict[str, torch.dtype]
    model_dtype: torch.dtype | None
    unfilled: Unfilled
    buffer_names: frozenset[str]

    @classmethod
    def of(cls, model: nn.Module) -> "Before":
        names = {id(parameter): name for name, parameter in model.named_parameters()}
        all_names = {name: names[id(p)] for name, p in model.named_parameters(remove_duplicate=False)}
        state = {name: leaf for name, leaf in model.state_dict(keep_vars=True).items() if isinstance(leaf, Tensor)}
        return cls(
            names=names,
            aliases={alias: name for alias, name in all_names.items() if alias != name},
            dtypes={name: tensor.dtype for name, tensor in state.items()},
            model_dtype=next((p.dtype for p in model.parameters() if p.is_floating_point()), None),
            unfilled=Unfilled(all_names.get(name, name) for name, leaf in state.items() if leaf.is_meta),
            buffer_names=frozenset(state) - frozenset(all_names),
        )


def check_optimizer(optimizer: Optimizer, names: dict[int, str]) -> None:
    """Refuse an optimizer that cannot be boosted.

    Raises:
        ConfigError: it is none of torch's, runs the model itself, or holds what the model does not have.
    """
    if not isinstance(optimizer, Optimizer) or isinstance(optimizer, HybridOptimizer):
        raise ConfigError(f"boost takes a torch.optim optimizer: got {type(optimizer).__name__}.")
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ConfigError("LBFGS runs the model inside its step, which a schedule cannot. Use another optimizer.")
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if id(parameter) not in names:
                raise ConfigError(
                    f"the optimizer holds a parameter of shape {tuple(parameter.shape)} that the model does not have. "
                    "Build it on model.parameters(), after the last change to the model."
                )


def check_same_weights(model: nn.Module, seed: int, control: Group) -> None:
    """Refuse weights (a few numbers of each are looked at) or seeds that differ. Collective: all ranks of ``control``.

    Raises:
        ConfigError: a rank's are others than those of rank 0.
    """
    digest = zlib.crc32(str((seed, type(model).__qualname__)).encode())
    for name, parameter in model.named_parameters():
        digest = zlib.crc32(f"{name} {tuple(parameter.shape)} {parameter.dtype}".encode(), digest)
        if not parameter.is_meta:
            flat = parameter.detach().reshape(-1)
            some = flat[:: max(1, flat.numel() // _NUM_COMPARED)][:_NUM_COMPARED].double().cpu()
            digest = zlib.crc32(some.numpy().tobytes(), digest)
    for name, buffer in model.named_buffers():
        digest = zlib.crc32(f"{name} {tuple(buffer.shape)} {buffer.dtype} {buffer.is_meta}".encode(), digest)
    rows = control.all_gather(torch.tensor([float(digest)], dtype=torch.float64))
    others = [rank for rank, row in enumerate(rows) if float(row) != float(rows[0])]
    if others:
        raise ConfigError(
            f"all ranks must boost the same model with the same weights and seed: rank {others[0]} differs from rank "
            "0. Call launch_from_torch(seed=...) before building the model, or load the same weights everywhere."
        )
