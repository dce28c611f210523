"""What ranks did and when, simulated or measured: one value to sum up, draw and trace. No torch in here."""

from hybridpp.timeline.span import COMPUTE_KINDS, Span
from hybridpp.timeline.timeline import Timeline

__all__ = ["COMPUTE_KINDS", "Span", "Timeline"]
