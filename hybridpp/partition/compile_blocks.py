"""Let a model's blocks run compiled: one compiled code for equal blocks."""

import re
import sysconfig
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from hybridpp.errors import ConfigError, PartitionError
from hybridpp.module_adapter import AdapterLayer, ModuleAdapter
from hybridpp.partition.blocks import finest_units
from hybridpp.partition.compiled import CompiledForward, compiled_parts
from hybridpp.partition.module_lists import is_list


def compile_blocks(adapter: ModuleAdapter, keywords: Mapping[str, Any], device: torch.device) -> set[nn.Module]:
    """Compile the forwards of the model's blocks at their first call; returns all modules inside.

    A block here is a unit of the finest cut, so it does not depend on the number of stages, that is in a list and has
    modules inside. What the script compiled itself stays as it is.

    Args:
        adapter: of the model, on which there is nothing yet.
        keywords: of ``torch.compile``.
        device: on which the blocks run.

    Raises:
        ConfigError: inductor's C++ compiler would not find torch.
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
    if device.type == "cpu" and keywords.get("backend", "inductor") == "inductor":
        _check_folders(str(Path(torch.__file__).parent), sysconfig.get_path("include"))
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


def _check_folders(*folders: str) -> None:
    """Inductor (torch 2.13) writes these into a compiler's command line without quotes, which is split at blanks."""
    for folder in folders:
        if re.search(r"[\s'\"\\]", folder):
            raise ConfigError(
                "compile_blocks needs torch and Python in folders without blanks or quotes, as inductor does not quote "
                f"them for its C++ compiler: got {folder!r}. Make the environment elsewhere, pass "
                "compile_blocks={'backend': 'aot_eager'}, or leave compile_blocks out."
            )
