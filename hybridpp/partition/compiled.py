"""Modules that ``torch.compile`` was applied to: blocks may be compiled, containers may not."""

import functools
import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Never

import torch
from torch import nn

from hybridpp.errors import PartitionError
from hybridpp.module_adapter import Forward, ModuleAdapter, forwards_inside
from hybridpp.nn import walk
from hybridpp.nn.torch_private import compiled_call_of, current_function_mode
from hybridpp.nn.watcher import run_unwatched

# Different blocks, training and evaluation, several formats and shapes: more than torch's 8 by default.
_MAX_GRAPHS = 64
_COMPILER = f"{torch.__name__}._dynamo"
_ADVICE = (
    "hybridpp: compile_blocks=True makes one graph of each block. Pass compile_blocks={'fullgraph': False} to run what "
    "cannot be compiled as it was written, or leave compile_blocks out."
)


class CompiledForward:
    """Runs forwards compiled. Blocks share it, so that torch finds what it compiled for the first of its kind."""

    def __init__(self, keywords: Mapping[str, Any]):
        known = inspect.signature(torch.compile).parameters
        more = {"recompile_limit": _MAX_GRAPHS, "isolate_recompiles": True}
        # Torch 2.11 has neither: there at most 8 graphs serve all models.
        compiler: Any = torch.compile
        self._compiled: Callable[..., Any] = compiler(
            _call, **keywords, **{name: value for name, value in more.items() if name in known}
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> "CompiledForward":
        """The same: it belongs to no module."""
        return self

    def run(self, inner: Forward, /, *args: Any, **kwargs: Any) -> Any:
        """Call ``inner`` compiled."""
        try:
            if current_function_mode() is not None:  # type: ignore[no-untyped-call]  # torch
                return run_unwatched(self._compiled, inner, args, kwargs)
            return self._compiled(inner, args, kwargs)
        except Exception as error:
            if type(error).__module__.startswith(_COMPILER):
                error.add_note(_ADVICE)
            raise


def _call(inner: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return inner(*args, **kwargs)


def is_compiled(module: nn.Module) -> bool:
    """Whether a module is compiled: in place, by a wrapper around it, or its forward."""
    return is_compiled_by_script(module) or has_compiled_forward(module)


def is_compiled_by_script(module: nn.Module) -> bool:
    """Whether it was compiled before boost."""
    if compiled_call_of(module) is not None or hasattr(type(module), "_opt_mod_attributes"):
        return True
    return any(
        hasattr(forward, "_torchdynamo_orig_callable") for forward in forwards_inside(vars(module).get("forward"))
    )


def has_compiled_forward(module: nn.Module) -> bool:
    """Whether the innermost layer around its forward is a :class:`CompiledForward`."""
    return any(
        isinstance(forward, functools.partial) and isinstance(getattr(forward.func, "__self__", None), CompiledForward)
        for forward in forwards_inside(vars(module).get("forward"))
    )


def compiled_parts(model: nn.Module) -> set[nn.Module]:
    """All modules that are compiled or in one that is: where something is set on them, each is compiled anew."""
    return {part for module in walk.modules(model) if is_compiled(module) for part in walk.modules(module)}


def refuse_compiled(model: nn.Module, modules: Iterable[nn.Module]) -> None:
    """Refuse compiled containers, including the model.

    Raises:
        PartitionError: one of ``modules`` is.
    """
    for module in modules:
        if is_compiled(module):
            name = next(name for name, found in walk.named_modules(model) if found is module)
            raise PartitionError(
                f"{f'module {name!r}' if name else 'the model'} is compiled as one unit, so it cannot be cut between "
                "its blocks. Compile the blocks before boost, each by block.compile()."
            )


def forbid_compile(adapter: ModuleAdapter, modules: Iterable[nn.Module]) -> None:
    """Let ``module.compile()`` raise: after boost it would compile what was set on the module."""
    for module in modules:
        adapter.set_attribute(module, "compile", _refuse_compile, "refusal of compile()")


def _refuse_compile(*args: Any, **kwargs: Any) -> Never:
    raise PartitionError(
        "a model must be compiled before boost: this one is already boosted. Call block.compile() on its blocks "
        "before boost."
    )
