"""Modules that compute in fp32 where the rest is in half precision: norms, and others by patterns of the user."""

import difflib
import functools
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from hybridpp.errors import ConfigError

# The format of norms, and of each module that a pattern, or one for a module around it, says something about.
Formats = Mapping[nn.Module, torch.dtype]


def module_formats(
    model: nn.Module, patterns: Sequence[str], half: torch.dtype | None, in_fp32: Collection[nn.Module] = ()
) -> Formats:
    """The format of every module that a pattern matches, and of all modules inside; fp32 for those of ``in_fp32``.

    A pattern is a module's name or class, in which ``*`` stands for anything, dots too; behind ``!`` it puts modules
    into half precision. The last pattern that matches a module counts, then what counts for the module around it, then
    ``in_fp32``.

    Args:
        model: whole; it is itself never matched.
        patterns: of the user.
        half: the format of the rest; None: nothing is in half precision, so there is nothing to say.
        in_fp32: modules that are in fp32 where no pattern says otherwise.

    Raises:
        ConfigError: a pattern matches nothing, or a weight or module would be in two formats.

    Example:
        >>> model = nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2))
        >>> list(module_formats(model, ["LayerNorm"], torch.bfloat16).values())
        [torch.float32]
    """
    _check_matches(model, patterns)
    formats: dict[nn.Module, torch.dtype] = {}
    if half is None:
        return formats
    seen: dict[nn.Module, tuple[str, torch.dtype | None]] = {}
    for name, module, told in _walk(model, "", patterns, half, None):
        format = torch.float32 if told is None and module in in_fp32 else told
        other, before = seen.setdefault(module, (name, format))
        if before is not format:
            raise ConfigError(_in_two_formats(other, name))
        if format is not None:
            formats[module] = format
    _check_ties(model, formats)
    return formats


def _walk(
    module: nn.Module, name: str, patterns: Sequence[str], half: torch.dtype, around: torch.dtype | None
) -> Iterator[tuple[str, nn.Module, torch.dtype | None]]:
    """Every module, under each of its names, with its format; None: it goes by the rules."""
    format = around
    for pattern in patterns:
        if name and _matches(pattern, name, module):
            format = half if pattern.startswith("!") else torch.float32
    yield name, module, format
    for child_name, child in module.named_children():
        yield from _walk(child, f"{name}.{child_name}" if name else child_name, patterns, half, format)


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
            f"fp32_modules names modules or their classes: nothing in {type(model).__name__} matches {pattern!r}. "
            f"Near: {', '.join(listed) or 'nothing'}. Use one of these, with * for what differs."
        )


def _check_ties(model: nn.Module, formats: Formats) -> None:
    holders: dict[int, tuple[str, bool]] = {}
    for name, module in model.named_modules():
        for parameter in module.parameters(recurse=False):
            here = formats.get(module) is torch.float32
            other, there = holders.setdefault(id(parameter), (name, here))
            if here is not there:
                raise ConfigError(_in_two_formats(other, name))


def _in_two_formats(first: str, second: str) -> str:
    return (
        f"fp32_modules puts only one of {first!r} and {second!r} in fp32, which share weights. Name both in it, or "
        "neither."
    )


def keep_formats(model: nn.Module, formats: Formats, half: torch.dtype | None) -> None:
    """Have modules cast what they are given to their format, and what they return to that of what is around them.

    Only the instance attribute ``forward`` is set, where the format changes. Cast are floating-point tensors in tuples,
    lists, dicts and Hugging Face outputs; float64 and complex ones stay as they are. A module without weights that is
    given nothing of the format around returns what it makes: it only follows what it is given.
    """
    if half is None:
        return
    borders: dict[nn.Module, torch.dtype] = {}
    for around in model.modules():
        for module in around.children():
            outside = formats.get(around, half)
            if formats.get(module, outside) is not outside:
                borders.setdefault(module, outside)
    for module, outside in borders.items():
        # functools.partial and no closure, so that the model can still be copied.
        holds = any(tensor.is_floating_point() for tensor in (*module.parameters(), *module.buffers()))
        run = _run_in if holds else _follow
        module.forward = functools.partial(run, formats[module], outside, module.forward)


def _follow(
    inside: torch.dtype, outside: torch.dtype, forward: Callable[..., Any], /, *args: Any, **kwargs: Any
) -> Any:
    leaves = pytree.tree_leaves((args, kwargs))
    if any(isinstance(leaf, Tensor) and leaf.dtype is outside for leaf in leaves):
        return _run_in(inside, outside, forward, *args, **kwargs)
    return forward(*args, **kwargs)


def _run_in(
    inside: torch.dtype, outside: torch.dtype, forward: Callable[..., Any], /, *args: Any, **kwargs: Any
) -> Any:
    if not kwargs and len(args) == 1:  # a norm, say: there are many, and a walk through containers takes its time
        return _cast(forward(_cast(args[0], outside, inside)), inside, outside)
    args, kwargs = _cast((args, kwargs), outside, inside)
    return _cast(forward(*args, **kwargs), inside, outside)


def _cast(tree: Any, before: torch.dtype, after: torch.dtype) -> Any:
    if isinstance(tree, Tensor):
        return _converted(before, after, tree)
    return pytree.tree_map_only(Tensor, functools.partial(_converted, before, after), tree)


def _converted(before: torch.dtype, after: torch.dtype, leaf: Tensor) -> Tensor:
    return leaf.to(after) if leaf.dtype is before else leaf
