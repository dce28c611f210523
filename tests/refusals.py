"""Expected errors of settings."""

import re

import pytest

from hybridpp.errors import ConfigError


def refused(text: str):
    """A context whose code must raise a ConfigError with exactly this message."""
    return pytest.raises(ConfigError, match=f"^{re.escape(text)}$")
