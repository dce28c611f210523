"""Record and check the arguments of ``boost`` before it changes them."""

import inspect
import zlib
from collections.abc import Collection, Mapping
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from hybridpp.errors import ConfigError
from hybridpp.nn import walk
from hybridpp.nn.peft_model import adapter_names, is_peft_model
from hybridpp.plugin import Boosted
from hybridpp_plugins.engine_handle import ENGINE, FailedBoost
from hybridpp_plugins.optimizer import HybridOptimizer
from hybridpp_plugins.rollback import UNUSABLE
from hybridpp_plugins.set_alike import Facts
from hybridpp_plugins.uninitialized import UninitializedWeights

# Elements of each parameter that are compared between ranks: enough to detect different initialisations.
_NUM_COMPARED = 16

SAME_MODEL = "all ranks must boost the same model with the same weights and seed"
SAME_WEIGHTS = "Call launch_from_torch(seed=...) before building the model, or load the same weights everywhere."

_IN_ORDER = (
    "Pass the model, the optimizer, the criterion, the dataloader and the LR scheduler in this order, or by name."
)


class OriginalModelInfo(NamedTuple):
    """A model's names and dtypes before boost.

    Attributes:
        names: the name of each parameter, by ``id``; the first name of a tied one.
        sizes: the number of elements of each, by this name.
        aliases: the other names of tied parameters, each with the first name.
        dtypes: of every tensor in the state dict, by name.
        model_dtype: of the first floating-point parameter.
        uninitialized: the weights without values.
        buffer_names: names of persistent buffers.
        adapters: of a peft model, for each adapter the model's name of each tensor in the adapter's file.
    """

    names: dict[int, str]
    sizes: dict[str, int]
    aliases: dict[str, str]
    dtypes: dict[str, torch.dtype]
    model_dtype: torch.dtype | None
    uninitialized: UninitializedWeights
    buffer_names: frozenset[str]
    adapters: Mapping[str, Mapping[str, str]]

    def first_name(self, name: str) -> str:
        """The name of a tensor under which this has it: of a tied parameter, the first."""
        return self.aliases.get(name, name)

    @classmethod
    def of(cls, model: nn.Module) -> "OriginalModelInfo":
        parameters = walk.named_parameters(model)
        names = {id(parameter): name for name, parameter in parameters}
        all_names = {name: names[id(p)] for name, p in model.named_parameters(remove_duplicate=False)}
        state = {name: leaf for name, leaf in model.state_dict(keep_vars=True).items() if isinstance(leaf, Tensor)}
        return cls(
            names=names,
            sizes={name: parameter.numel() for name, parameter in parameters},
            aliases={alias: name for alias, name in all_names.items() if alias != name},
            dtypes={name: tensor.dtype for name, tensor in state.items()},
            model_dtype=next((p.dtype for _, p in parameters if p.is_floating_point()), None),
            uninitialized=UninitializedWeights(
                all_names.get(name, name) for name, leaf in state.items() if leaf.is_meta
            ),
            buffer_names=frozenset(state) - frozenset(all_names),
            adapters=adapter_names(model) if is_peft_model(model) else {},
        )


def check_parts(parts: Boosted) -> None:
    """Refuse a model or an LR scheduler that cannot be boosted.

    Raises:
        ConfigError: the model is no module, is boosted already or is what a failed boost left, or the scheduler cannot
            step.
    """
    if not isinstance(parts.model, nn.Module):
        raise ConfigError(f"boost needs a torch.nn.Module: got {type(parts.model).__name__}. {_IN_ORDER}")
    if isinstance(vars(parts.model).get(ENGINE), FailedBoost):
        raise ConfigError(UNUSABLE)
    if ENGINE in vars(parts.model):
        raise ConfigError("this model is boosted already. Call booster.boost once.")
    if parts.lr_scheduler is not None and not callable(getattr(parts.lr_scheduler, "step", None)):
        raise ConfigError(
            f"boost needs an LR scheduler with a step method: got {type(parts.lr_scheduler).__name__}. Pass one "
            "that was made with the optimizer."
        )


def check_optimizer(optimizer: Optimizer, names: dict[int, str]) -> None:
    """Refuse an optimizer that cannot be boosted.

    Raises:
        ConfigError: it is no torch optimizer, its step needs a closure, or it holds parameters of another model.
    """
    if not isinstance(optimizer, Optimizer) or isinstance(optimizer, HybridOptimizer):
        way_out = _IN_ORDER
        if isinstance(optimizer, dict):
            way_out = "Pass a list of several optimizers, or one with parameter groups."
        elif isinstance(optimizer, HybridOptimizer):
            way_out = "This one was boosted with another model: make a new optimizer from model.parameters()."
        raise ConfigError(f"boost needs a torch.optim optimizer: got {type(optimizer).__name__}. {way_out}")
    if _needs_closure(optimizer):
        raise ConfigError(
            f"the step of {type(optimizer).__name__} needs a closure that runs the model, which is not possible with a "
            "pipeline schedule. Use another optimizer."
        )
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if id(parameter) not in names:
                raise ConfigError(
                    f"the optimizer holds a parameter of shape {tuple(parameter.shape)} that is not in the model. "
                    "Create it from model.parameters(), after the last change to the model."
                )


def with_gradients(optimizer: Optimizer) -> frozenset[int]:
    """The parameters, by ``id``, that have a gradient which is not zero; the host waits for the device for these."""
    return frozenset(
        id(parameter)
        for group in optimizer.param_groups
        for parameter in group["params"]
        if parameter.grad is not None and bool(_elements(parameter.grad).any())
    )


def _needs_closure(optimizer: Optimizer) -> bool:
    """Whether ``step`` cannot be called without arguments."""
    try:
        inspect.signature(type(optimizer).step).bind(optimizer)
    except TypeError:
        return True
    except ValueError:  # it has no signature
        return False
    return False


def _elements(tensor: Tensor) -> Tensor:
    """The elements of a tensor; of a sparse one those that it holds."""
    if tensor.layout is torch.strided:
        return tensor.reshape(-1)
    return (tensor.coalesce() if tensor.layout is torch.sparse_coo else tensor).values().reshape(-1)


def weight_facts(model: nn.Module, seed: int, buffer_names: Collection[str]) -> Facts:
    """The seed and, by name, what a few elements of each parameter and persistent buffer are; shapes of all others.

    Args:
        model: before boost.
        seed: of random numbers in its forward.
        buffer_names: of persistent buffers. Others are computed by each host, which may round in another way.
    """
    facts: Facts = {"": {"the seed": str(seed)}}
    compared: dict[tuple[torch.device, torch.dtype], list[tuple[str, Tensor]]] = {}
    named = [*walk.named_parameters(model), *walk.named_buffers(model)]
    for name, tensor in named:
        facts[name] = {"value": f"{tuple(tensor.shape)} {tensor.dtype}{' without values' if tensor.is_meta else ''}"}
        if not tensor.is_meta and (isinstance(tensor, nn.Parameter) or name in buffer_names):
            some = _elements(tensor.detach())
            if (step := some.numel() // _NUM_COMPARED) > 1:
                some = some[::step]
            compared.setdefault((some.device, some.dtype), []).append((name, some[:_NUM_COMPARED]))
    # One copy for each device and dtype, for which the host waits.
    for values in compared.values():
        together = torch.cat([some for _, some in values])
        together = torch.view_as_real(together).flatten(1) if together.is_complex() else together
        on_host = torch.split(together.double().cpu(), [len(some) for _, some in values])
        for (name, _), some in zip(values, on_host, strict=True):
            first = f", first {some.flatten()[0].item():g}" if some.numel() else ""
            facts[name]["value"] += f"{first}, CRC-32 {zlib.crc32(some.numpy().tobytes()):08x}"
    return facts
