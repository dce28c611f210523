"""What a model declares to be fp32 in a half-precision model: as its own library would load it.

Models of transformers and of diffusers name tensors and modules whose values half precision would spoil: biases that
choose experts, gates, positions. Both libraries keep these in fp32 when they load a model in half precision.
"""

import re
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

import torch
from torch import nn

from hybridpp.nn import walk
from hybridpp.nn.torch_private import buffers_of, parameters_of

_ALWAYS, _PLAIN = "_keep_in_fp32_modules_strict", "_keep_in_fp32_modules"
_Matches = Callable[[str], bool]


class DeclaredFp32(NamedTuple):
    """What of a model is fp32 because a model class says so.

    Attributes:
        modules: with all that is in them. Their inputs are cast to fp32, and their outputs stay in fp32, as there.
        tensors: of other modules, by ``id``.
    """

    modules: frozenset[nn.Module]
    tensors: frozenset[int]

    @classmethod
    def of(cls, model: nn.Module, half: torch.dtype | None) -> "DeclaredFp32":
        """Of a model in a half precision; None: of one that is in none, of which nothing is declared.

        transformers looks for its patterns anywhere in a name, and uses ``_keep_in_fp32_modules`` in fp16 only, and
        ``_keep_in_fp32_modules_strict`` in bf16 as well. diffusers, which has no such second list, compares the parts
        of a name, and uses the list in both.

        A module that shares a weight with one that is not declared is left out, and so is the weight.
        """
        modules, tensors = set[nn.Module](), set[int]()
        for root in walk.modules(model) if half in (torch.float16, torch.bfloat16) else ():
            if (matches := _matcher(root, half)) is None:
                continue
            for name, module in walk.named_modules(root):
                if name and (module in modules or matches(name)):
                    modules.update(walk.modules(module))
                    continue
                prefix = f"{name}." if name else ""
                own = {**parameters_of(module), **buffers_of(module)}
                tensors.update(
                    id(tensor) for key, tensor in own.items() if tensor is not None and matches(prefix + key)
                )
        if not modules:
            return cls(frozenset(), frozenset(tensors))
        shared = {
            id(parameter)
            for module in walk.modules(model)
            if module not in modules
            for parameter in module.parameters(recurse=False)
        }
        tied = {module for module in modules if any(id(one) in shared for one in walk.parameters(module))}
        return cls(frozenset(modules - tied), frozenset(tensors))


def _matcher(module: nn.Module, half: torch.dtype | None) -> _Matches | None:
    """Whether the class of a module declares a name inside of it; None: it declares none."""
    always, plain = [*_listed(module, _ALWAYS)], [*_listed(module, _PLAIN)]
    if hasattr(module, _ALWAYS):
        patterns = [*always, *(plain if half is torch.float16 else ())]
        pattern = re.compile("|".join(f"(?:{one.replace('*', '.*')})" for one in patterns))
        return (lambda name: pattern.search(name) is not None) if patterns else None
    parts = frozenset(plain)
    return (lambda name: not parts.isdisjoint(name.split("."))) if parts else None


def _listed(module: nn.Module, attribute: str) -> Iterator[str]:
    found = getattr(module, attribute, None)
    if isinstance(found, str):
        yield found
    elif isinstance(found, Iterable):
        yield from sorted(one for one in found if isinstance(one, str) and one)
