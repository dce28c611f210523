"""All generators of a process go on as they were."""

import random

import numpy
import torch

from hybridpp.cluster import generator_states, set_generator_states

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
