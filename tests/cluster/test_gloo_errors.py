"""Errors of gloo, by their text; those of real connections are in test_torch_group.py."""

import pytest

from hybridpp.cluster.gloo_errors import is_gloo_error, is_gloo_timeout

SOURCE = "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:533] "


@pytest.mark.parametrize(
    ("text", "is_timeout"),
    [
        (f"{SOURCE}Connection closed by peer [127.0.0.1]:1", False),
        (f"{SOURCE}Timed out waiting 1000ms for recv operation to complete", True),
        ("Application timeout caused pair closure", True),
    ],
)
def test_errors_of_communications_and_timeouts_among_them(text, is_timeout):
    assert is_gloo_error(RuntimeError(text))
    assert is_gloo_timeout(RuntimeError(text)) == is_timeout


@pytest.mark.parametrize("error", [RuntimeError("no file data/gloo"), OSError(SOURCE), ValueError("timeout")])
def test_other_errors_are_not_gloos(error):
    assert not is_gloo_error(error)
