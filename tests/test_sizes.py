"""Memory sizes as text."""

import pytest

from hybridpp.config import PartitionConfig
from hybridpp.errors import ConfigError
from hybridpp.sizes import format_bytes, parse_bytes


@pytest.mark.parametrize(
    ("text", "size"),
    [(5, 5), ("16GiB", 2**34), ("1.5 kib", 1536), ("2GB", 2_000_000_000), ("10 b", 10), ("1TiB", 2**40)],
)
def test_sizes_are_read_as_people_write_them(text, size):
    assert PartitionConfig(memory_limit=text).limit_bytes == size


@pytest.mark.parametrize("value", [0, -1, "0GiB", "16", "GiB", "16 gigs", 1.5, True, b"1GiB", 10**400, f"{10**400}B"])
def test_what_is_no_size_is_refused(value):
    with pytest.raises(ConfigError, match=r"^memory_limit must be a number of bytes above 0, or text with a unit"):
        PartitionConfig(memory_limit=value)


@pytest.mark.parametrize("size", [1, 1023, 1024, 12345, 2**30 - 1, 2**30, 3 * 2**40 + 12345])
def test_a_size_that_is_told_is_enough(size):
    assert parse_bytes("memory_limit", format_bytes(size)) >= size
