"""What ranks did and when, simulated or measured: one value to sum up, draw and trace. No torch in here."""

from hybridpp.timeline.messages import Message, messages
from hybridpp.timeline.picture import draw
from hybridpp.timeline.span import COMPUTE_KINDS, Span
from hybridpp.timeline.timeline import Timeline
from hybridpp.timeline.trace import chrome_trace, save_trace

__all__ = ["COMPUTE_KINDS", "Message", "Span", "Timeline", "chrome_trace", "draw", "messages", "save_trace"]
