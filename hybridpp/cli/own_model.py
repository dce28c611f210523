"""A model of one's own on the command line: ``module:function`` or ``file.py:function``."""

import importlib
import importlib.util
import inspect
import sys
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from hybridpp.errors import ConfigError, named, text_of
from hybridpp.nn.torch_private import pytree
from hybridpp.partition import CallArguments


class OwnModel(NamedTuple):
    """What a function of the user's returned.

    Attributes:
        model: on the meta device, in evaluation mode.
        sample: arguments of a micro-batch, on the CPU; None: the function gave none.
        batch_size: samples in it.
    """

    model: nn.Module
    sample: CallArguments | None
    batch_size: int


def is_own_model(name: str) -> bool:
    """Whether the name of a model is ``module:function``, and not that of a folder or of a model on the hub."""
    module, colon, function = name.rpartition(":")
    return bool(colon and module and function.isidentifier()) and not Path(name).exists()


def load_own_model(name: str) -> OwnModel:
    """Call the function, with the meta device for what it makes.

    It returns a model, or a model and a sample batch: a tensor, a tuple or a dict, as the model is called with them.

    Raises:
        ConfigError: there is no such function, it raises, or it returns something else.
    """
    module_name, _, function_name = name.rpartition(":")
    function = getattr(_module(module_name), function_name, None)
    if not callable(function):
        raise ConfigError(f"{module_name} has no function {function_name!r}, which --model {name} names.")
    try:
        with torch.device("meta"):
            made = function()
    except Exception as error:  # whatever the user's code raises
        raise ConfigError(f"{name} raised {named(error)}. It is called without arguments.") from error
    model, sample = made if isinstance(made, tuple) and len(made) == 2 else (made, None)
    if not isinstance(model, nn.Module):
        raise ConfigError(
            f"{name} must return a torch.nn.Module, or one and a sample batch: got {type(made).__name__}."
        )
    sample = pytree.tree_map_only(Tensor, _on_cpu, sample)
    sizes = [leaf.shape[0] for leaf in pytree.tree_leaves(sample) if isinstance(leaf, Tensor) and leaf.dim()]
    return OwnModel(model.eval(), None if sample is None else _arguments(model, sample), sizes[0] if sizes else 1)


def _module(name: str) -> ModuleType:
    """A module of the folder that the command runs in, or of an installed package; or a file."""
    try:
        if not name.endswith(".py"):
            if str(Path.cwd()) not in sys.path:
                sys.path.insert(0, str(Path.cwd()))
            return importlib.import_module(name)
        spec = importlib.util.spec_from_file_location(Path(name).stem, name)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:  # whatever the user's code raises
        why = text_of(error) if isinstance(error, ImportError | OSError) else named(error)
        raise ConfigError(
            f"{name} cannot be imported: {why}. Pass --model module:function, with a module that Python "
            "finds from here, or file.py:function."
        ) from error
    return module


def _on_cpu(tensor: Tensor) -> Tensor:
    """What was made on the meta device has no values: zeros."""
    return torch.zeros(tensor.shape, dtype=tensor.dtype) if tensor.is_meta else tensor.cpu()


def _arguments(model: nn.Module, sample: Any) -> CallArguments:
    """The arguments of the model's call: without what its forward does not take, such as labels."""
    parameters = inspect.signature(model.forward).parameters.values()
    if isinstance(sample, dict):
        takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
        names = {parameter.name for parameter in parameters}
        return (), {name: value for name, value in sample.items() if takes_all or name in names}
    positional = sample if isinstance(sample, tuple | list) else (sample,)
    if any(parameter.kind is parameter.VAR_POSITIONAL for parameter in parameters):
        return tuple(positional), {}
    taken = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    return tuple(positional[: len(taken)]), {}
