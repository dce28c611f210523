"""What ranks did and when, simulated or measured: a value to summarise, draw and trace. Imports no torch."""

from hybridpp.timeline.picture import draw
from hybridpp.timeline.span import COMPUTE_KINDS, Span
from hybridpp.timeline.timeline import Timeline
from hybridpp.timeline.trace import chrome_trace, save_trace
from hybridpp.timeline.transfers import Transfer, transfers

__all__ = ["COMPUTE_KINDS", "Span", "Timeline", "Transfer", "chrome_trace", "draw", "save_trace", "transfers"]
