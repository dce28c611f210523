"""A pretend accelerator, ``"gpusim"``: its numbers are in host memory, and what would fail or wait on a GPU shows.

It is torch's backend for devices written in Python, which is private, experimental and registered for the whole process
for ever: so only ``tests/scripts/on_device.py`` imports this file, in a process of its own.

Operations that mix devices raise. What cannot run: moving a parameter by ``parameter.data = ...`` from the CPU, since
tensors of the two devices are of different classes (move the model before boost, which unties what is tied); streams,
events and pinned memory.
"""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import return_and_correct_aliasing
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

from hybridpp.cluster.world import override
from hybridpp.code_owner import CodeOwner, code_owner

_setup_privateuseone_for_python_backend("gpusim")
DEVICE = torch.device("gpusim", 0)
# Above this, CUDA copies from memory that is not pinned in steps for which the host waits.
STAGED_BYTES = 2**16


class Event(NamedTuple):
    """What a rank did.

    Attributes:
        kind: ``"wait"`` (the host reads the device's numbers), ``"upload"`` (a copy from host memory), ``"compute"``.
        rank: the in-process rank; -1 outside of one.
        place: file and function of hybridpp that did it, or the name of the operation.
        nbytes: of the copy.
        pinned: whether the copy is from page-locked memory.
    """

    kind: str
    rank: int
    place: str
    nbytes: int = 0
    pinned: bool = False

    @property
    def stalls(self) -> bool:
        """Whether the host waits for it: a read, or a large copy from pageable memory."""
        return self.kind == "wait" or (self.kind == "upload" and not self.pinned and self.nbytes > STAGED_BYTES)


EVENTS: list[Event] = []
"""Everything since the list was last cleared, in order."""


class DeviceTensor(Tensor):
    """A tensor on the device; ``raw`` has its numbers."""

    raw: Tensor

    @staticmethod
    def __new__(cls, raw: Tensor) -> "DeviceTensor":
        made = Tensor._make_wrapper_subclass(
            cls,
            raw.size(),
            strides=raw.stride(),
            storage_offset=raw.storage_offset(),
            dtype=raw.dtype,
            device=DEVICE,
        )
        made.raw = raw
        return made

    @property
    def data(self) -> Tensor:  # type: ignore[override]
        return self.detach()

    @data.setter
    def data(self, value: "DeviceTensor") -> None:
        Tensor.data.__set__(self, value)
        self.raw = value.raw

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (Tensor.tolist, Tensor.numpy):  # torch refuses them for subclasses
            return func(args[0].cpu())
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {})

    def __repr__(self, **_: Any) -> str:
        return f"DeviceTensor({self.raw})"


def _is_ours(device: Any) -> bool:
    return device is not None and torch.device(device).type == DEVICE.type


def _is_library(frame: Any) -> bool:
    return code_owner(frame.f_code.co_filename) is CodeOwner.HYBRIDPP


def _place() -> str:
    frame = sys._getframe(1)
    while frame is not None and (not _is_library(frame) or frame.f_code.co_name[0] == "<"):
        frame = frame.f_back
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_code.co_name}" if frame else "script"


def _note(kind: str, place: str, source: Tensor | None = None) -> None:
    world = override.get()
    copied = {} if source is None else {"nbytes": source.nbytes, "pinned": source.is_pinned()}
    EVENTS.append(Event(kind, -1 if world is None else world.rank, place, **copied))


def _mapped(kind: type, function: Callable[[Any], Any], tree: Any) -> Any:
    """As torch's pytree, which takes a quarter of the time: arguments of operations are in these containers only."""
    if isinstance(tree, kind):
        return function(tree)
    if isinstance(tree, tuple | list):
        return type(tree)([_mapped(kind, function, one) for one in tree])
    if isinstance(tree, dict):
        return {key: _mapped(kind, function, value) for key, value in tree.items()}
    return tree


def _tensors(tree: Any) -> list[Tensor]:
    found: list[Tensor] = []
    _mapped(Tensor, found.append, tree)
    return found


def _raw(tree: Any) -> Any:
    return _mapped(DeviceTensor, lambda tensor: tensor.raw, tree)


def _moved(source: Tensor, is_target_ours: bool) -> None:
    if isinstance(source, DeviceTensor) and not is_target_ours:
        _note("wait", _place())
    elif is_target_ours and not isinstance(source, DeviceTensor):
        _note("upload", _place(), source)


def _run(func: Any, args: Any, kwargs: Any) -> Any:
    name = func.overloadpacket.__name__
    leaves = _tensors((args, kwargs))
    fakes = [leaf for leaf in leaves if isinstance(leaf, FakeTensor)]
    if fakes:  # a trace, whose tensors on the device are fake, too
        mode = fakes[0].fake_mode
        args, kwargs = _mapped(
            DeviceTensor, lambda tensor: FakeTensor(mode, tensor.raw.to("meta"), DEVICE), (args, kwargs)
        )
        return func(*args, **kwargs)
    ours = [leaf for leaf in leaves if isinstance(leaf, DeviceTensor)]
    if name == "_to_copy":
        target = kwargs.get("device")
        is_ours = bool(ours) if target is None else _is_ours(target)
        _moved(args[0], is_ours)
        options = {key: value for key, value in kwargs.items() if key not in ("device", "non_blocking", "pin_memory")}
        copied = func(_raw(args[0]), **options)
        return DeviceTensor(copied) if is_ours else copied
    if name == "copy_":
        _moved(args[1], isinstance(args[0], DeviceTensor))
        func(*_raw(args))
        return args[0]
    if name == "_local_scalar_dense":
        _note("wait", _place())
        return func(*_raw(args))
    # As on a GPU, a number of host memory is allowed.
    others = [leaf for leaf in leaves if leaf.dim() and not isinstance(leaf, DeviceTensor)]
    if ours and others:
        raise RuntimeError(f"Expected all tensors to be on the same device: {func} got {ours[0]} and {others[0]}")
    wraps = bool(ours)
    if kwargs.get("device") is not None:
        wraps, kwargs = _is_ours(kwargs["device"]), {**kwargs, "device": "cpu"}
    if ours:
        _note("compute", name)
    raw_args, raw_kwargs = _raw((args, kwargs))
    result = func(*raw_args, **raw_kwargs)
    if not wraps:
        return result
    own = {id(tensor.raw): tensor for tensor in ours}
    result = _mapped(Tensor, lambda tensor: own[id(tensor)] if id(tensor) in own else DeviceTensor(tensor), result)
    writes = any(argument.alias_info and argument.alias_info.is_write for argument in func._schema.arguments)
    return result if writes else return_and_correct_aliasing(func, args, kwargs, result)


# Operations without a tensor among their arguments: torch.empty(..., device="gpusim").
_LIBRARY = torch.library.Library("_", "IMPL")
_LIBRARY.fallback(lambda func, *args, **kwargs: _run(func, args, kwargs), "PrivateUse1")
