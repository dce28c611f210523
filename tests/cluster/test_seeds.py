import random
from itertools import product

import numpy
import pytest
import torch

from hybridpp.cluster import microbatch_key, preserved_random_state, seed_stream, set_seed

CPU = torch.device("cpu")


def test_one_seed_for_every_generator_of_the_process():
    def drawn():
        set_seed(2**40 + 3)
        return random.random(), float(numpy.random.rand()), torch.rand(1).item()

    assert drawn() == drawn()


def test_keys_of_runs_steps_and_microbatches_are_distinct_seeds():
    keys = {microbatch_key(*place) for place in product([0, 1, -1, 1024, 2**63], range(20), range(20))}
    assert len(keys) == 5 * 20 * 20
    assert all(0 <= key < 2**63 for key in keys)


def test_a_key_is_the_same_in_every_run_of_the_program():
    assert microbatch_key(1024, 0, 0) == 4012293175030837512


def test_a_place_draws_the_same_whatever_was_drawn_before():
    def drawn(key, place):
        seed_stream(key, place, CPU)
        return torch.rand(2).tolist()

    with preserved_random_state(CPU):
        first = {(key, place): drawn(key, place) for key in (0, 1, 2**63 - 1) for place in range(5)}
        torch.rand(7)
        again = {at: drawn(*at) for at in reversed(list(first))}
    assert first == again
    assert len({tuple(numbers) for numbers in first.values()}) == len(first)


@pytest.mark.parametrize("error", [None, RuntimeError])
def test_the_users_generator_is_left_as_it_was(error):
    torch.manual_seed(3)
    torch.rand(5)
    before = torch.get_rng_state()
    try:
        with preserved_random_state(CPU):
            seed_stream(1, 1, CPU)
            torch.rand(100)
            if error:
                raise error
    except RuntimeError:
        pass
    assert torch.equal(torch.get_rng_state(), before)
