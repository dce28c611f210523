import socket

import pytest

from hybridpp.cli import endpoint
from hybridpp.cli.endpoint import wait_for_endpoint


@pytest.fixture
def unused():
    """A socket with an address at which nobody listens yet."""
    with socket.socket() as own:
        own.bind(("127.0.0.1", 0))
        yield own


def test_an_endpoint_that_is_up_is_found(unused):
    unused.listen()
    assert wait_for_endpoint(*unused.getsockname(), 0)


def test_an_endpoint_that_comes_later_is_waited_for(unused, monkeypatch):
    """Between two attempts it begins to listen."""
    monkeypatch.setattr(endpoint.time, "sleep", lambda _: unused.listen())
    assert wait_for_endpoint(*unused.getsockname(), 60)


def test_an_endpoint_that_does_not_come_is_told(unused):
    assert not wait_for_endpoint(*unused.getsockname(), 0)
    assert not wait_for_endpoint("no such name", 29500, 0)
