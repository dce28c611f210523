"""Requests to stop, told in loops that call ``booster.backward`` themselves: these exchange no message of a step."""

from hybridpp.cluster import PendingNumbers, StopRequest, start_gather_numbers
from hybridpp_plugins.layout import Layout

_CALL = "at the end of booster.backward, which tells of signals"


class StopExchange:
    """Tells all ranks of a signal, without a wait: what one backward pass sends is read at the end of the next one.

    Args:
        layout: the ranks.
    """

    def __init__(self, layout: Layout):
        self._control = layout.control
        self._stop: StopRequest = layout.world.stop
        self._pending: PendingNumbers | None = None

    def begin(self) -> None:
        """A backward pass begins: from the first one on, a signal is a request. Nothing is communicated."""
        self._stop.begin_step()

    def end(self) -> None:
        """A backward pass that reduces gradients is over. Collective: all ranks.

        Raises:
            UnlikeCallsError: ranks were in different calls at the end of the backward pass before.
        """
        if self._pending is not None:
            self._stop.heard(number for (number,) in self._pending.wait())
        self._pending = start_gather_numbers(self._control, _CALL, [float(self._stop.own)])
        self._stop.step_done()
