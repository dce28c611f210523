"""All generators of a process go on as they were."""

import random

import numpy
import pytest
import torch

from hybridpp.cluster import check_generator_states, generator_states, set_generator_states
from hybridpp.errors import ConfigError

CPU = torch.device("cpu")


def draw():
    return random.random(), numpy.random.rand(), random.gauss(0, 1), numpy.random.randn(), torch.rand(3).tolist()


def test_every_generator_repeats_what_it_drew():
    before = generator_states(CPU)
    draw()
    states = generator_states(CPU)
    expected = [draw() for _ in range(3)]
    set_generator_states(states, CPU)
    assert [draw() for _ in range(3)] == expected
    set_generator_states(before, CPU)
    assert draw() != expected[0]


def test_states_of_a_device_that_is_not_there_are_left_out():
    states = {**generator_states(CPU), "cuda": torch.zeros(16, dtype=torch.uint8)}
    expected = draw()
    set_generator_states(states, CPU)
    assert draw() == expected


def test_states_are_checked_without_a_change():
    states = generator_states(CPU)
    check_generator_states(states, CPU)
    for name, wrong in (("python", (3, (1, 2), None)), ("numpy", 3), ("torch", torch.ones(4)), ("torch", None)):
        with pytest.raises(ConfigError, match="a state of the random generators is none"):
            check_generator_states({**states, name: wrong}, CPU)
    with pytest.raises(ConfigError, match="KeyError: 'numpy'"):
        check_generator_states({"python": states["python"]}, CPU)
    assert str(generator_states(CPU)) == str(states)
