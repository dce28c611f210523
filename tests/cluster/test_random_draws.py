"""Finding out whether code draws from torch's default generators."""

import pytest
import torch

from hybridpp.cluster import DrawMonitor, default_generators, has_drawn

CPU = torch.device("cpu")


@pytest.mark.parametrize("draw", [lambda: torch.rand(1), lambda: torch.nn.functional.dropout(torch.ones(8), 0.5)])
def test_a_draw_is_found_and_the_next_numbers_are_the_same(draw):
    (generator,) = default_generators(CPU)
    generator.manual_seed(7)
    assert not has_drawn(generator)
    draw()
    expected = torch.rand(4)
    generator.manual_seed(7)
    draw()
    assert has_drawn(generator)
    assert has_drawn(generator), "looking changes the state"
    assert torch.equal(torch.rand(4), expected)


def test_what_draws_nothing_moves_no_generator():
    torch.default_generator.manual_seed(7)
    torch.nn.functional.dropout(torch.ones(8), 0.5, training=False)
    torch.nn.functional.scaled_dot_product_attention(*[torch.ones(1, 1, 4, 4)] * 3, dropout_p=0.0)
    torch.rand(3, generator=torch.Generator())
    assert not has_drawn(torch.default_generator)


def test_a_monitor_finds_draws_only_while_it_observes():
    monitor, generator = DrawMonitor(), torch.default_generator
    generator.manual_seed(7)
    torch.rand(1)
    monitor.note(generator)
    assert not monitor.found
    monitor.observe()
    monitor.note(generator)
    generator.manual_seed(8)
    monitor.note(generator)
    assert monitor.found
    monitor.stop()
    monitor.observe()
    assert not monitor.found


def test_draws_are_expected_again_after_a_failure():
    monitor = DrawMonitor()

    def fail():
        with monitor.expecting(False):
            assert not monitor.expected
            raise RuntimeError("in the unit")

    with pytest.raises(RuntimeError, match="in the unit"):
        fail()
    assert monitor.expected
