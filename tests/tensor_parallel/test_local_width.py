"""Attention that takes the width of its heads from what it is given trains as in one process."""

import functools

import pytest
from attention_blocks import Block, Shaped
from sequence_models import Net, assert_equal, sequences, squares
from support import train

BATCHES = [sequences(5, seed) for seed in range(2)]


def net():
    return Net(lambda: Block(8, attention=Shaped(8)))


@functools.cache
def one_process():
    return train(net, BATCHES, criterion=squares, num_microbatches=2)


@pytest.mark.parametrize(
    "layout",
    [
        {"tp_size": 4},
        {"pp_size": 2, "schedule": "zb-h1"},
        {"gradient_checkpoint_config": {}},
        {"enable_sequence_parallelism": True},
    ],
    ids=str,
)
def test_every_layout(layout, caplog):
    with caplog.at_level("WARNING", logger="hybridpp"):
        run = train(net, BATCHES, criterion=squares, num_microbatches=2, **{"tp_size": 2, **layout})
    assert "stay replicated" not in caplog.text, "all of it is sharded"
    assert_equal(run, one_process())
