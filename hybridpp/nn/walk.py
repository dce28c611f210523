"""A model's modules, parameters and buffers: what torch's methods list, in less than half of the time.

``boost`` lists them dozens of times. Torch's methods are generators, nested as deep as the modules are, and hash each
tensor in Python.
"""

from collections.abc import Callable, Mapping
from typing import TypeVar

from torch import Tensor, nn

from hybridpp.nn.torch_private import buffers_of, children_of, parameters_of

_T = TypeVar("_T", bound=Tensor)
# A class, or a model, that replaces one of them decides itself what there is.
_LISTING = tuple(
    (name, getattr(nn.Module, name))
    for name in ("named_modules", "modules", "named_parameters", "parameters", "named_buffers", "buffers")
)


class ScriptListing:
    """What stands on a module in the place of one of these methods, for scripts: not for who calls functions of this
    file."""


def named_modules(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """``[*model.named_modules()]``: one that is registered twice has its first name."""
    if _lists_itself(model):
        return [*model.named_modules()]
    found = _names(model)
    return [*zip(found.values(), found, strict=True)]


def modules(model: nn.Module) -> list[nn.Module]:
    """``[*model.modules()]``."""
    return [*model.modules()] if _lists_itself(model) else [*_names(model)]


def named_parameters(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """``[*model.named_parameters()]``: a tied one has its first name."""
    return [*model.named_parameters()] if _lists_itself(model) else _named(model, parameters_of)


def parameters(model: nn.Module) -> list[nn.Parameter]:
    """``[*model.parameters()]``."""
    return [*model.parameters()] if _lists_itself(model) else _nameless(model, parameters_of)


def named_buffers(model: nn.Module) -> list[tuple[str, Tensor]]:
    """``[*model.named_buffers()]``: a shared one has its first name."""
    return [*model.named_buffers()] if _lists_itself(model) else _named(model, buffers_of)


def buffers(model: nn.Module) -> list[Tensor]:
    """``[*model.buffers()]``."""
    return [*model.buffers()] if _lists_itself(model) else _nameless(model, buffers_of)


def submodule(model: nn.Module, name: str) -> nn.Module:
    """``model.get_submodule(name)`` of one of the :func:`named_modules`."""
    module = model
    for step in name.split(".") if name else ():
        child = children_of(module).get(step)
        if child is None:
            return model.get_submodule(name)  # a class that lists modules itself may have given the name
        module = child
    return module


def _lists_itself(model: nn.Module) -> bool:
    own, kind = vars(model), type(model)
    return any(
        getattr(kind, name) is not method or (name in own and not isinstance(own[name], ScriptListing))
        for name, method in _LISTING
    )


def _names(model: nn.Module) -> dict[nn.Module, str]:
    """The modules, in order, with their names."""
    found = {model: ""}
    _add_children(children_of(model), "", found)
    return found


def _add_children(children: Mapping[str, nn.Module | None], prefix: str, found: dict[nn.Module, str]) -> None:
    for name, child in children.items():
        if child is None or child in found:
            continue
        path = prefix + name
        if type(child).named_modules is not nn.Module.named_modules:
            found.update((module, own) for own, module in child.named_modules({*found}, path))
            continue
        found[child] = path
        if inner := children_of(child):
            _add_children(inner, f"{path}.", found)


def _named(model: nn.Module, tensors_of: Callable[[nn.Module], Mapping[str, _T | None]]) -> list[tuple[str, _T]]:
    found: dict[int, tuple[str, _T]] = {}
    for module, path in _names(model).items():
        # The items: a dict that hides some may list them (``prune.py``).
        if held := tensors_of(module).items():
            prefix = f"{path}." if path else ""
            for name, tensor in held:
                if tensor is not None and id(tensor) not in found:
                    found[id(tensor)] = prefix + name, tensor
    return [*found.values()]


def _nameless(model: nn.Module, tensors_of: Callable[[nn.Module], Mapping[str, _T | None]]) -> list[_T]:
    found = {id(held): held for module in _names(model) for _, held in tensors_of(module).items() if held is not None}
    return [*found.values()]
