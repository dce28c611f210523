"""That a run of few blocks stands for one of many is tested where runs are made: with the plugin's estimates."""

import torch
from torch import nn

from hybridpp.estimate import Repeated, repeated_blocks


class Block(nn.Module):
    def __init__(self, number, width=4):
        super().__init__()
        self.number, self.linear = number, nn.Linear(width, width)


MIDDLE = (Repeated(("4", "5", "6", "7"), 1, tuple(map(str, range(10)))),)


def model(*blocks):
    return nn.ModuleDict({str(index): block for index, block in enumerate(blocks)})


def names(count):
    return [str(number) for number in range(count)]


def test_the_inner_ones_of_a_row_of_equal_blocks_need_not_run():
    made = model(*(Block(number) for number in range(10)))
    assert repeated_blocks(made, names(10), frozenset()) == MIDDLE
    assert repeated_blocks(made, names(7), frozenset()) == ()


def test_blocks_that_differ_end_a_row():
    def others(change):
        blocks = [Block(number) for number in range(10)]
        blocks[5] = change(blocks[5])
        return repeated_blocks(model(*blocks), names(10), frozenset())

    def windowed(block):
        block.window = 8
        return block

    def frozen(block):
        return block.requires_grad_(requires_grad=False)

    def double(block):
        return block.to(torch.float64)

    def activated(block):
        block.activation = nn.functional.gelu
        return block

    def mapped(block):
        block.options = {"causal": True}
        return block

    assert others(lambda block: block) != ()
    assert others(activated) == others(mapped) == ()
    for change in (windowed, frozen, double, lambda block: Block(5, width=8), lambda block: Block(17)):
        assert others(change) == ()


def test_functions_and_containers_of_blocks_are_compared():
    def made(last):
        blocks = [Block(number) for number in range(10)]
        for block in blocks:
            block.activation, block.options, block.kind = nn.functional.relu, {"window": [1, 2]}, torch.float32
        for name, value in last.items():
            setattr(blocks[5], name, value)
        return repeated_blocks(model(*blocks), names(10), frozenset())

    assert made({}) == made({"options": {"window": [1, 2]}}) == MIDDLE
    for other in ({"activation": nn.functional.gelu}, {"options": {"window": [1, 3]}}, {"kind": torch.float64}):
        assert made(other) == ()


def test_blocks_that_are_recomputed_are_not_equal_to_others():
    made = model(*(Block(number) for number in range(10)))
    assert repeated_blocks(made, names(10), frozenset(names(5))) == ()
    assert repeated_blocks(made, names(10), frozenset(names(10))) == MIDDLE


def test_blocks_that_take_turns_are_left_out_by_periods():
    def made(count, period=2):
        blocks = [Block(number) for number in range(count)]
        for number, block in enumerate(blocks):
            block.window = 8 if number % period else None
        return repeated_blocks(model(*blocks), names(count), frozenset())

    assert made(13) == (Repeated(tuple(map(str, range(6, 10))), 2, tuple(map(str, range(12)))),)
    # One more than whole periods; and too few of them.
    assert made(14) == (Repeated(tuple(map(str, range(6, 12))), 2, tuple(map(str, range(14)))),)
    assert made(11) == ()
    assert made(40, period=6) == (Repeated(tuple(map(str, range(18, 30))), 6, tuple(map(str, range(36)))),)


def test_each_row_of_equal_blocks_is_left_out():
    blocks = [*(Block(number) for number in range(9)), *(Block(number, width=8) for number in range(8))]
    first, second = repeated_blocks(model(*blocks), names(17), frozenset())
    assert first == Repeated(("4", "5", "6"), 1, tuple(map(str, range(9))))
    assert second == Repeated(("13", "14"), 1, tuple(map(str, range(9, 17))))
