"""Modules that compute in fp32 in a half-precision model: norms, what the model declares, what the user asks for."""

import difflib
import functools
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn

from hybridpp.errors import ConfigError
from hybridpp.module_adapter import AdapterLayer, ModuleAdapter
from hybridpp.nn import walk
from hybridpp.nn.torch_private import pytree
from hybridpp.precision.declared_fp32 import DeclaredFp32
from hybridpp.precision.norm_modules import norm_modules

# The dtype of norms, and of each module that a pattern matches, or whose enclosing module one matches.
ModuleDtypes = Mapping[nn.Module, torch.dtype]


def find_module_dtypes(
    model: nn.Module, patterns: Sequence[str], half: torch.dtype | None, in_fp32: Collection[nn.Module] = ()
) -> ModuleDtypes:
    """The dtype of every module that a pattern matches, and of its submodules; fp32 for the modules in ``in_fp32``.

    fp32 also for modules that the model declares (:class:`DeclaredFp32`).

    A pattern is a module's name or class name, in which ``*`` matches any text, including dots. A leading ``!`` selects
    half precision instead of fp32. The last matching pattern wins, then the enclosing module's dtype, then ``in_fp32``.

    Args:
        model: the complete model; patterns never match the model itself.
        patterns: the user's.
        half: the dtype of all other modules; None: the model is not in half precision, and the result is empty.
        in_fp32: modules that are in fp32 unless a pattern says otherwise.

    Raises:
        ConfigError: a pattern matches nothing, or a weight or module would have two dtypes.

    Example:
        >>> model = nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2))
        >>> list(find_module_dtypes(model, ["LayerNorm"], torch.bfloat16).values())
        [torch.float32]
    """
    _check_matches(model, patterns)
    module_dtypes: dict[nn.Module, torch.dtype] = {}
    if half is None:
        return module_dtypes
    in_fp32 = {*in_fp32, *DeclaredFp32.of(model, half).modules}
    seen: dict[nn.Module, tuple[str, torch.dtype | None]] = {}
    for name, module, requested in _walk(model, "", patterns, half, None):
        dtype = torch.float32 if requested is None and module in in_fp32 else requested
        other, before = seen.setdefault(module, (name, dtype))
        if before is not dtype:
            raise ConfigError(_tied_error_text(other, name))
        if dtype is not None:
            module_dtypes[module] = dtype
    _check_ties(model, module_dtypes)
    return module_dtypes


def _walk(
    module: nn.Module, name: str, patterns: Sequence[str], half: torch.dtype, around: torch.dtype | None
) -> Iterator[tuple[str, nn.Module, torch.dtype | None]]:
    """Every module, under each of its names, with the dtype that patterns give it, or None."""
    dtype = around
    for pattern in patterns:
        if name and _matches(pattern, name, module):
            dtype = half if pattern.startswith("!") else torch.float32
    yield name, module, dtype
    for child_name, child in module.named_children():
        yield from _walk(child, f"{name}.{child_name}" if name else child_name, patterns, half, dtype)


def _matches(pattern: str, name: str, module: nn.Module) -> bool:
    pattern = pattern.removeprefix("!")
    return any(fnmatchcase(word, pattern) for word in (name, f".{name}", type(module).__name__))


def _check_matches(model: nn.Module, patterns: Sequence[str]) -> None:
    modules = [(name, module) for name, module in model.named_modules(remove_duplicate=False) if name]
    for pattern in patterns:
        if any(_matches(pattern, name, module) for name, module in modules):
            continue
        words = {re.sub(r"(?<=\.)\d+(?=\.|$)", "*", name) for name, _ in modules}
        words |= {word.rpartition(".")[2] for word in words} | {type(module).__name__ for _, module in modules}
        asked = pattern.removeprefix("!").replace("*", "").strip(".").lower()
        near = {word for word in words if difflib.get_close_matches(asked, [word.lower()], cutoff=0.5)}
        listed = sorted(near, key=lambda word: -difflib.SequenceMatcher(None, asked, word.lower()).ratio())[:5]
        raise ConfigError(
            f"fp32_modules must match module names or class names: nothing in {type(model).__name__} matches "
            f"{pattern!r}. Similar names: {', '.join(listed) or 'none'}. Use one of these, with * as a wildcard."
        )


def _check_ties(model: nn.Module, module_dtypes: ModuleDtypes) -> None:
    holders: dict[int, tuple[str, bool]] = {}
    for name, module in walk.named_modules(model):
        for parameter in module.parameters(recurse=False):
            is_fp32 = module_dtypes.get(module) is torch.float32
            other, other_is_fp32 = holders.setdefault(id(parameter), (name, is_fp32))
            if is_fp32 is not other_is_fp32:
                raise ConfigError(_tied_error_text(other, name))


def _tied_error_text(first: str, second: str) -> str:
    return f"fp32_modules selects only one of {first!r} and {second!r}, which share weights. Select both or neither."


def wrap_dtype_boundaries(adapter: ModuleAdapter, module_dtypes: ModuleDtypes, half: torch.dtype | None) -> None:
    """Wrap modules so that they cast their inputs to their own dtype, and their outputs to the surrounding dtype.

    Half-precision and fp32 tensors are cast, also inside tuples, lists, dicts and Hugging Face outputs; other dtypes
    are not. A module without weights casts only if an input has the surrounding dtype. The outputs of a module that the
    model declares (:class:`DeclaredFp32`) are not cast, unless it is a norm: the code around it expects fp32 there.
    """
    for module, bound in dtype_boundaries(adapter.model, module_dtypes, half).items():
        adapter.wrap(module, AdapterLayer.DTYPE, *bound)


def dtype_boundaries(
    model: nn.Module, module_dtypes: ModuleDtypes, half: torch.dtype | None
) -> dict[nn.Module, tuple[Any, ...]]:
    """The function that :func:`wrap_dtype_boundaries` puts around each module, with its first arguments."""
    if half is None:
        return {}
    borders: dict[nn.Module, torch.dtype] = {}
    for around in walk.modules(model):
        for module in around.children():
            outside = module_dtypes.get(around, half)
            if module_dtypes.get(module, outside) is not outside:
                borders.setdefault(module, outside)
    declared = DeclaredFp32.of(model, half).modules - norm_modules(model)
    found: dict[nn.Module, tuple[Any, ...]] = {}
    for module, outside in borders.items():
        if module in declared and module_dtypes[module] is torch.float32:
            found[module] = _run_widened, outside
            continue
        holds = any(tensor.is_floating_point() for tensor in (*walk.parameters(module), *walk.buffers(module)))
        found[module] = _run_in_dtype if holds else _run_if_input_has_dtype, module_dtypes[module], outside
    return found


def _run_if_input_has_dtype(
    inside: torch.dtype, outside: torch.dtype, forward: Callable[..., Any], /, *args: Any, **kwargs: Any
) -> Any:
    leaves = pytree.tree_leaves((args, kwargs))
    if any(isinstance(leaf, Tensor) and leaf.dtype is outside for leaf in leaves):
        return _run_in_dtype(inside, outside, forward, *args, **kwargs)
    return forward(*args, **kwargs)


def _run_in_dtype(
    inside: torch.dtype, outside: torch.dtype, forward: Callable[..., Any], /, *args: Any, **kwargs: Any
) -> Any:
    if not kwargs and len(args) == 1:  # the most common call (norms), without the cost of flattening containers
        return _cast(forward(_cast(args[0], outside, inside)), inside, outside)
    args, kwargs = _cast((args, kwargs), outside, inside)
    return _cast(forward(*args, **kwargs), inside, outside)


def _run_widened(outside: torch.dtype, forward: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    args, kwargs = _cast((args, kwargs), outside, torch.float32)
    return forward(*args, **kwargs)


def _cast(tree: Any, before: torch.dtype, after: torch.dtype) -> Any:
    if isinstance(tree, Tensor):
        return _converted(before, after, tree)
    return pytree.tree_map_only(Tensor, functools.partial(_converted, before, after), tree)


def _converted(before: torch.dtype, after: torch.dtype, leaf: Tensor) -> Tensor:
    return leaf.to(after) if leaf.dtype is before else leaf
