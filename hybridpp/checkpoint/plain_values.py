"""Python values as JSON and back, without pickle: what a checkpoint keeps beside tensors of parameters."""

import base64
import math
from collections import Counter, OrderedDict
from collections.abc import Callable
from typing import Any

import numpy
import torch
from torch import Tensor

from hybridpp.errors import CheckpointError, ConfigError, text_of

_TAG = "$"
# Containers in containers. A reader is deeper in calls than a writer may be, and needs several for each.
_MAX_DEPTH = 64
# What they take in JSON: three for each, and some for what is in them.
_MAX_JSON_DEPTH = 256
_NUMPY_KINDS = "biufc"
_DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64, torch.complex128),
        *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
        *(torch.uint64, torch.uint32, torch.uint16, torch.float8_e4m3fn, torch.float8_e5m2),
    )
}


def encode(value: Any, name: str) -> Any:
    """A value as JSON can hold it.

    Args:
        value: None, numbers, text, bytes, lists, tuples, sets, dicts, tensors and numpy arrays, nested in any way.
        name: of the value, in errors.

    Raises:
        ConfigError: something in it is of another type, it is nested more than 64 deep, or it holds itself.
    """
    return _encode(value, name, 0)


def _encode(value: Any, name: str, depth: int) -> Any:
    kind = type(value)
    if depth > _MAX_DEPTH:
        raise ConfigError(
            f"{name.partition('[')[0]} is nested more than {_MAX_DEPTH} deep, or holds itself: a checkpoint cannot "
            "hold it. Use flat lists and dicts."
        )
    if value is None or kind in (bool, int, str):
        return value
    if kind is float:
        return value if math.isfinite(value) else {"$float": str(value)}
    if kind is list:
        return [_encode(item, f"{name}[{n}]", depth + 1) for n, item in enumerate(value)]
    if kind in (dict, OrderedDict, Counter):
        return _encode_dict(value, name, depth)
    if kind in (tuple, set, frozenset):
        items = value if kind is tuple else sorted(value, key=repr)
        return {f"{_TAG}{kind.__name__}": [_encode(item, f"{name}[{n}]", depth + 1) for n, item in enumerate(items)]}
    if kind is complex:
        return {"$complex": [_encode(value.real, name, depth), _encode(value.imag, name, depth)]}
    if kind is bytes:
        return {"$bytes": base64.b64encode(value).decode()}
    if isinstance(value, Tensor) and value.layout is torch.strided and _name_of(value.dtype) in _DTYPES:
        return {"$tensor": [_name_of(value.dtype), list(value.shape), _bytes_of(value)]}
    if isinstance(value, numpy.generic | numpy.ndarray) and value.dtype.kind in _NUMPY_KINDS:
        array = numpy.ascontiguousarray(value)
        return {"$numpy": [array.dtype.str, list(numpy.shape(value)), base64.b64encode(array.tobytes()).decode()]}
    what = f"{kind.__name__} of {value.dtype}" if hasattr(value, "dtype") else kind.__name__
    if isinstance(value, Tensor) and value.layout is not torch.strided:
        what = f"Tensor of {value.layout}"
    raise ConfigError(
        f"{name} is a {what}, which a checkpoint cannot hold: it is read without running code. Use numbers, "
        "text, lists, tuples, dicts, tensors or numpy arrays; for another object, its state_dict()."
    )


def _encode_dict(value: dict[Any, Any], name: str, depth: int) -> Any:
    if type(value) is dict and all(type(key) is str and not key.startswith(_TAG) for key in value):
        return {key: _encode(item, f"{name}[{key!r}]", depth + 1) for key, item in value.items()}
    pairs = [
        [_encode(key, f"a key of {name}", depth + 1), _encode(item, f"{name}[{key!r}]", depth + 1)]
        for key, item in value.items()
    ]
    return {f"{_TAG}{type(value).__name__}": pairs}


def _name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _bytes_of(tensor: Tensor) -> str:
    host = tensor.detach().cpu().contiguous().reshape(-1)
    return base64.b64encode(host.view(torch.uint8).numpy().tobytes()).decode()


def _decoded_items(parts: Any, depth: int) -> list[Any]:
    if not isinstance(parts, list):
        raise TypeError(f"{parts!r:.60} is no list")
    return [_decode(item, depth + 1) for item in parts]


def _decoded_pairs(parts: Any, depth: int) -> dict[Any, Any]:
    pairs = [(_decode(key, depth + 2), _decode(item, depth + 2)) for key, item in parts]
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a key is there twice")
    return found


def _decoded_bytes(text: Any) -> bytes:
    if not isinstance(text, str):
        raise TypeError(f"{text!r:.60} is no text")
    return base64.b64decode(text, validate=True)


def _sized(shape: Any, itemsize: int, data: bytearray) -> tuple[int, ...]:
    """A shape of which there are all bytes."""
    if not isinstance(shape, list) or any(type(size) is not int or size < 0 for size in shape) or len(shape) > 64:
        raise ValueError(f"{shape!r:.60} is no shape")
    if math.prod(shape) * itemsize != len(data):
        raise ValueError(f"the shape {shape} takes {math.prod(shape) * itemsize} bytes, and there are {len(data)}")
    if math.prod(max(size, 1) for size in shape) >= 2**60:
        raise ValueError(f"{shape!r:.60} is no shape")
    return tuple(shape)


def _tensor(parts: Any, depth: int) -> Tensor:
    dtype, shape, text = parts
    data, kind = bytearray(_decoded_bytes(text)), _DTYPES[dtype]
    sizes = _sized(shape, kind.itemsize, data)
    return torch.frombuffer(data, dtype=kind).reshape(sizes) if data else torch.empty(sizes, dtype=kind)


def _array(parts: Any, depth: int) -> Any:
    name, shape, text = parts
    if not isinstance(name, str) or (dtype := numpy.dtype(name)).kind not in _NUMPY_KINDS:
        raise TypeError(f"{name!r:.60} is no dtype of an array")
    data = bytearray(_decoded_bytes(text))
    array = numpy.frombuffer(data, dtype=dtype).reshape(_sized(shape, dtype.itemsize, data))
    return array if shape else array[()]


def _complex(parts: Any, depth: int) -> complex:
    real, imaginary = _decoded_items(parts, depth)
    return complex(real, imaginary)


_DECODERS: dict[str, Callable[[Any, int], Any]] = {
    "$float": lambda text, _: {"inf": math.inf, "-inf": -math.inf, "nan": math.nan}[text],
    "$complex": _complex,
    "$bytes": lambda text, _: _decoded_bytes(text),
    "$tuple": lambda items, depth: tuple(_decoded_items(items, depth)),
    "$set": lambda items, depth: set(_decoded_items(items, depth)),
    "$frozenset": lambda items, depth: frozenset(_decoded_items(items, depth)),
    "$dict": _decoded_pairs,
    "$OrderedDict": lambda pairs, depth: OrderedDict(_decoded_pairs(pairs, depth)),
    "$Counter": lambda pairs, depth: Counter(_decoded_pairs(pairs, depth)),
    "$tensor": _tensor,
    "$numpy": _array,
}


def decode(value: Any) -> Any:
    """The value that :func:`encode` was given; tensors are on the host.

    Raises:
        CheckpointError: it is not what :func:`encode` writes.
    """
    return _decode(value, 0)


def _decode(value: Any, depth: int) -> Any:
    if depth > _MAX_JSON_DEPTH:
        raise CheckpointError("the checkpoint holds a value that is nested deeper than any that is saved.")
    if isinstance(value, list):
        return [_decode(item, depth + 1) for item in value]
    if not isinstance(value, dict):
        return value
    tags = [key for key in value if key.startswith(_TAG)]
    if not tags:
        return {key: _decode(item, depth + 1) for key, item in value.items()}
    try:
        ((tag, parts),) = value.items()
        return _DECODERS[tag](parts, depth + 1)
    except (KeyError, ValueError, TypeError, RuntimeError, OverflowError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(
            f"the checkpoint holds a value that this version cannot read: {tags[0]!r}, {text_of(error)}. Use the "
            "version that wrote it."
        ) from error
