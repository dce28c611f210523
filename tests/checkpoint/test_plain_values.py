"""Values that a checkpoint keeps come back as they were, bit for bit, and without pickle."""

import json
import math
import random
import re
from collections import Counter, OrderedDict

import numpy
import pytest
import torch

from hybridpp.checkpoint.plain_values import decode, encode
from hybridpp.errors import CheckpointError, ConfigError

VALUES = [
    None,
    True,
    -(2**70),
    0.1,
    -math.inf,
    "text",
    b"\x00\xff",
    1 - 2j,
    [1, [2.5, ()]],
    (1, (2,), [3]),
    {"a": {"b": (1,)}},
    {1: "one", (2, 3): "pair"},
    {"$tensor": "a key like a tag"},
    Counter({5: 2}),
    OrderedDict([("b", 1), ("a", 2)]),
    {1, 2},
    frozenset("a"),
    random.Random(0).getstate(),
]


def through_json(value):
    return decode(json.loads(json.dumps(encode(value, "value"), allow_nan=False)))


@pytest.mark.parametrize("value", VALUES, ids=repr)
def test_a_value_comes_back_with_its_type(value):
    back = through_json(value)
    assert back == value
    assert type(back) is type(value)


def test_nan_comes_back():
    assert math.isnan(through_json([math.nan])[0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.bool, torch.int64, torch.complex64])
@pytest.mark.parametrize("shape", [(), (3,), (2, 0), (2, 3)])
def test_a_tensor_comes_back_bit_for_bit(dtype, shape):
    turned = torch.randn(shape).to(dtype).transpose(0, -1)
    back = through_json({"x": turned})["x"]
    assert back.dtype == dtype
    assert torch.equal(back, turned)
    back.zero_()  # the memory is its own


@pytest.mark.parametrize(
    "array", [numpy.arange(6.0).reshape(2, 3).T, numpy.float32(0.1), numpy.array(3), numpy.int64(7)]
)
def test_numpy_arrays_and_numbers_come_back(array):
    back = through_json(array)
    assert numpy.array_equal(back, array)
    assert back.dtype == array.dtype


def test_generator_states_come_back():
    state = numpy.random.RandomState(1).get_state()
    back = through_json(state)
    assert numpy.array_equal(back[1], state[1])
    assert back[2:] == state[2:]


class Custom:
    pass


@pytest.mark.parametrize(
    ("value", "name"), [({"a": [Custom()]}, "extras['a'][0] is a Custom"), ({Custom: 1}, "a key of extras is a type")]
)
def test_an_object_is_refused_by_name(value, name):
    with pytest.raises(ConfigError, match=re.escape(f"{name}, which a checkpoint cannot hold")):
        encode(value, "extras")


@pytest.mark.parametrize(
    "stored",
    [
        {"$object": 1},
        {"$tensor": ["float32", [9], "AAAA"]},
        {"$tensor": ["float32", [4], ""]},
        {"$tensor": ["float32", [-1], "AAAAAAAA"]},
        {"$tensor": ["float32", [0, 2**40, 2**40], ""]},
        {"$numpy": ["O", [1], "AAAAAAAAAAA="]},
        {"$numpy": [3, [1], "AAAA"]},
        {"$bytes": "A*A="},
        {"$tuple": "abc"},
        {"$dict": [[1, 2], [1, 3]]},
        {"$set": [[1]]},
        {"$float": "one"},
        {"$float": []},
    ],
)
def test_what_was_not_encoded_is_refused(stored):
    with pytest.raises(CheckpointError, match="the checkpoint holds a value that this version cannot read"):
        decode(stored)


def wrapped(kind, depth):
    value = 1
    for _ in range(depth):
        value = {"list": [value], "tuple": (value,), "dict": {"a": value}, "numbered": {1: value}}[kind]
    return value


def deeper(calls, run):
    return run() if calls == 0 else deeper(calls - 1, run)


@pytest.mark.parametrize("kind", ["list", "tuple", "dict", "numbered"])
def test_what_is_too_deep_to_be_read_is_refused_when_it_is_written(kind):
    value = wrapped(kind, 64)
    text = json.dumps(encode(value, "extras"))
    assert deeper(300, lambda: decode(json.loads(text))) == value
    with pytest.raises(ConfigError, match="extras is nested more than 64 deep, or holds itself"):
        encode(wrapped(kind, 65), "extras")


def test_what_is_nested_deeper_than_anything_that_is_written_is_refused():
    value = 1
    for _ in range(500):
        value = [value]
    with pytest.raises(CheckpointError, match="a value that is nested deeper than any that is saved"):
        decode(value)
