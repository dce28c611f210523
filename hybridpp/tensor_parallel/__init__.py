"""Divide the layers of a model over ranks."""

from hybridpp.tensor_parallel.plan import Kind, Layout, Plan, Style, parse_style

__all__ = ["Kind", "Layout", "Plan", "Style", "parse_style"]
