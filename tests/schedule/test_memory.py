import pytest

from hybridpp.schedule import parse_action, peak_activations


@pytest.mark.parametrize(
    ("row", "peak"),
    [
        ("", 0),
        ("0F0 0B0 0F1 0B1", 1),
        ("0F0 0SEND_F0 0F1 0B0 0F2 0F3 0B1", 3),
        ("0F0 0F1 0I0 0F2 0W0", 3),
        ("0F0 0I0 0W0 0F1 0B1", 1),
        ("0F0 1F0 1B0 0B0", 2),
    ],
)
def test_an_activation_is_held_from_its_forward_until_its_backward_is_done(row, peak):
    assert peak_activations((tuple(map(parse_action, row.split())), ())) == (peak, 0)
