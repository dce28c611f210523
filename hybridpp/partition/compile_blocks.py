"""Let a model's blocks run compiled: one compiled code for equal blocks."""

from collections.abc import Mapping
from typing import Any

from torch import nn

from hybridpp.errors import PartitionError
from hybridpp.module_adapter import AdapterLayer, ModuleAdapter
from hybridpp.partition.blocks import finest_units
from hybridpp.partition.compiled import CompiledForward, compiled_parts
from hybridpp.partition.module_lists import is_list


def compile_blocks(adapter: ModuleAdapter, keywords: Mapping[str, Any]) -> set[nn.Module]:
    """Compile the forwards of the model's blocks at their first call; returns all modules inside.

    A block here is a unit of the finest cut, so it does not depend on the number of stages, that is in a list and has
    modules inside. What the script compiled itself stays as it is.

    Args:
        adapter: of the model, on which there is nothing yet.
        keywords: of ``torch.compile``.

    Raises:
        PartitionError: the model has no such block.
    """
    model = adapter.model
    done = compiled_parts(model)
    blocks = [module for name in finest_units(model) if _is_block(model, name, module := model.get_submodule(name))]
    if not blocks:
        raise PartitionError(
            f"compile_blocks found no block in {type(model).__name__}: every module of a ModuleList or Sequential is a "
            "single layer or a Sequential again. Leave compile_blocks out, and call module.compile() before boost on "
            "what shall be compiled."
        )
    compiled, inside = CompiledForward(keywords), set[nn.Module]()
    for module in blocks:
        if done.isdisjoint(module.modules()):
            adapter.wrap(module, AdapterLayer.COMPILE, compiled.run)
            inside.update(part for part in module.modules() if part is not module)
    adapter.expect_compiled(inside)
    return inside


def _is_block(model: nn.Module, name: str, module: nn.Module) -> bool:
    around = model.get_submodule(name.rpartition(".")[0])
    return is_list(around) and next(module.children(), None) is not None
