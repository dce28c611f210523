"""Modules that ``torch.compile`` was applied to: blocks may be compiled, containers may not."""

from collections.abc import Iterable
from typing import Any, Never

from torch import nn

from hybridpp.errors import PartitionError
from hybridpp.module_adapter import ModuleAdapter
from hybridpp.nn.torch_private import compiled_call_of


def is_compiled(module: nn.Module) -> bool:
    """Whether a module is compiled: in place, by a wrapper around it, or its forward."""
    if compiled_call_of(module) is not None or hasattr(type(module), "_opt_mod_attributes"):
        return True
    return hasattr(vars(module).get("forward"), "_torchdynamo_orig_callable")


def compiled_parts(model: nn.Module) -> set[nn.Module]:
    """All modules that are compiled or in one that is: where something is set on them, each is compiled anew."""
    return {part for module in model.modules() if is_compiled(module) for part in module.modules()}


def refuse_compiled(model: nn.Module, modules: Iterable[nn.Module]) -> None:
    """Refuse compiled containers, including the model.

    Raises:
        PartitionError: one of ``modules`` is.
    """
    for module in modules:
        if is_compiled(module):
            name = next(name for name, found in model.named_modules() if found is module)
            raise PartitionError(
                f"{f'module {name!r}' if name else 'the model'} is compiled as one unit, so it cannot be cut between "
                "its blocks. Compile the blocks before boost, each by block.compile()."
            )


def forbid_compile(adapter: ModuleAdapter, modules: Iterable[nn.Module]) -> None:
    """Let ``module.compile()`` say that it comes too late: it would compile what was set on the module."""
    for module in modules:
        adapter.set_attribute(module, "compile", _too_late, "refusal of compile()")


def _too_late(*args: Any, **kwargs: Any) -> Never:
    raise PartitionError(
        "a model must be compiled before boost: this one is already boosted. Call block.compile() on its blocks "
        "before boost."
    )
