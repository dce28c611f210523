"""The command ``hybridpp``."""

from hybridpp.cli.main import main

__all__ = ["main"]
