"""The ways that a block's forward takes: which of its lines call which functions of torch."""

import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from hashlib import blake2b
from pathlib import PurePath
from types import FrameType
from typing import Any

from torch import nn

from hybridpp.code_owner import CodeOwner, code_owner
from hybridpp.nn import walk
from hybridpp.nn.metadata_functions import WITHOUT_VALUES
from hybridpp.nn.torch_private import is_functorch_active
from hybridpp.nn.watcher import WatchingMode, with_lost_weight

# What changes no numbers and is called by who changes dtypes, checkpoints or reads a scalar.
_PLAIN = frozenset(
    {"__get__", "__set__", "to", "type_as", "float", "half", "bfloat16", "double", "detach", "clone", "contiguous"}
    | {
        "requires_grad_",
        "item",
        "view_as",
        "set_",
        "_set_grad_enabled",
        "__bool__",
        "__float__",
        "__int__",
        "__index__",
    }
)
_MODULES = "torch.nn.modules."
# Around a layer's forward, which it calls in one way with checkpointing and in another without.
_AROUND_FORWARDS = "transformers.modeling_layers"


class WayRecorder:
    """Records the ways of one module's calls, while its hooks are on.

    A way is a function of torch with the lines of the script's code, and of libraries of models, that lead from the
    module's forward to its call. So a branch that was not taken before is another way; another number of rounds of a
    loop, or of positions, is none. What this library calls itself, as in sharded layers, is none either.

    Args:
        module: gets two hooks.

    Attributes:
        found: of the call that has ended last: each way's digest, with the function and its line in words.
    """

    def __init__(self, module: nn.Module):
        self.found: dict[int, str] = {}
        self._mode: _Mode | None = None
        self._hooks = [
            # Functions, as copies of the module share them.
            module.register_forward_pre_hook(lambda *_: self._begin(sys._getframe(1)), prepend=True),
            module.register_forward_hook(lambda *_: self._end(), prepend=True, always_call=True),
        ]

    def remove(self) -> None:
        """Take the hooks off."""
        for hook in self._hooks:
            hook.remove()

    def _begin(self, frame: FrameType) -> None:
        if self._mode is None and not is_functorch_active():
            self.found = {}
            # The frame of the module's call, which is there until it ends.
            self._mode = _Mode(frame, self.found)
            self._mode.__enter__()  # type: ignore[no-untyped-call]  # torch

    def _end(self) -> None:
        if self._mode is not None and not is_functorch_active():
            self._mode.__exit__(None, None, None)  # type: ignore[no-untyped-call]  # torch
            self._mode = None


class _Mode(WatchingMode):
    def __init__(self, outermost: FrameType, found: dict[int, str]):
        super().__init__()
        self._outermost, self._found = outermost, found

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = with_lost_weight(func, kwargs or {})
        name = getattr(func, "__name__", "")
        if name not in _PLAIN and func not in WITHOUT_VALUES:
            self._note(name.strip("_") if name.startswith("__") else name)
        return func(*args, **kwargs)

    def made(self, result: Any) -> None:
        """What compiled code does is not looked at."""

    def _note(self, name: str) -> None:
        lines = list(_lines(sys._getframe(2), self._outermost))
        if not lines:
            return
        key = ";".join(f"{module}:{function}:{line}" for module, function, line, _ in lines)
        digest = int.from_bytes(blake2b(f"{name}|{key}".encode(), digest_size=8).digest())
        self._found.setdefault(digest, f"{name} ({lines[0][-1]})")


def _lines(frame: FrameType | None, outermost: FrameType) -> Iterator[tuple[str, str, int, str]]:
    """The script's lines from the call of a function outwards; none if this library calls it.

    Of each the code's module and name, the line's number in it, and the file and line in words.
    """
    is_own = is_of_module = False
    while frame is not None and frame is not outermost:
        name, code, line = str(frame.f_globals.get("__name__", "")), frame.f_code, frame.f_lineno
        owner = code_owner(code.co_filename)
        if code.co_name == "__torch_function__":
            is_own = False  # what was between is another mode, for whoever called that
        elif owner is CodeOwner.HYBRIDPP:
            # Around a module's own forward, a layer of the library's stands.
            is_own = not is_of_module
        elif owner is CodeOwner.TORCH:
            is_of_module = is_of_module or name.startswith(_MODULES)
        elif is_own:
            return
        elif name != _AROUND_FORWARDS:
            is_of_module = True
            yield name, code.co_qualname, line - code.co_firstlineno, f"{PurePath(code.co_filename).name}:{line}"
        frame = frame.f_back


@contextmanager
def recorded_ways(model: nn.Module, blocks: Collection[str]) -> Iterator[dict[str, frozenset[int]]]:
    """Inside, the ways of each block's first call in each run of the model are noted, which trials repeat."""
    found: dict[str, frozenset[int]] = {}
    called: set[str] = set()
    recorders = {name: WayRecorder(walk.submodule(model, name)) for name in blocks}
    hooks = [model.register_forward_pre_hook(lambda *_: called.clear(), prepend=True)]

    def noting(name: str, recorder: WayRecorder) -> Callable[..., None]:
        def note(*_: Any) -> None:
            if name not in called:
                called.add(name)
                found[name] = found.get(name, frozenset()) | frozenset(recorder.found)

        return note

    for name, recorder in recorders.items():
        hooks.append(walk.submodule(model, name).register_forward_hook(noting(name, recorder)))
    try:
        yield found
    finally:
        for recorder in recorders.values():
            recorder.remove()
        for hook in hooks:
            hook.remove()


def ways_of_call(module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> frozenset[int]:
    """The ways of one call of a module."""
    recorder = WayRecorder(module)
    try:
        module(*args, **kwargs)
    finally:
        recorder.remove()
    return frozenset(recorder.found)
