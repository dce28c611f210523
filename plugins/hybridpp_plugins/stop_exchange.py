"""What ranks tell each other in loops that call ``booster.backward``: these exchange no message of a step."""

from hybridpp.cluster import PendingNumbers, StopRequest, start_gather_numbers
from hybridpp_plugins.layout import Layout
from hybridpp_plugins.manual_loss import ManualLosses
from hybridpp_plugins.optimizer_step import GroupSettings, ModelModes, ScriptCalls
from hybridpp_plugins.replica_buffers import ReplicaBuffers

_CALL = "at the end of booster.backward, which tells of signals"
_MAY_BE_USED = "Steps since the last backward pass may have used them: load a checkpoint on all ranks."


class StopExchange:
    """Tells all ranks of a signal, of other settings and calls, and of losses made in other ways, without a wait.

    What one backward pass sends is read at the end of the next one.

    Args:
        layout: the ranks.
        settings: of the optimizer.
        calls: of the script.
        modes: of the model.
        losses: of the script's passes; None: there is one replica.
        buffers: of the model, with frozen parameters that forwards write to; None: there are none.
    """

    def __init__(
        self,
        layout: Layout,
        settings: GroupSettings,
        calls: ScriptCalls,
        modes: ModelModes,
        losses: ManualLosses | None = None,
        buffers: ReplicaBuffers | None = None,
    ):
        self._settings, self._calls, self._modes, self._losses = settings, calls, modes, losses
        self._buffers = buffers
        self._control = layout.control
        self._stop: StopRequest = layout.world.stop
        self._pending: PendingNumbers | None = None

    def begin(self) -> None:
        """A backward pass begins: from the first one on, a signal is a request. Nothing is communicated."""
        self._stop.begin_step()

    def end(self) -> None:
        """A backward pass that reduces gradients is over. Collective: all ranks.

        Raises:
            UnlikeCallsError: ranks were in different calls at the end of the backward pass before, or had called the
                optimizer in other ways until then.
            UnequalRanksError: ranks had other settings of the optimizer or modes of the model then, and still have.
        """
        if self._pending is not None:
            signals, digests, kinds, called, modes, writes = zip(*self._pending.wait(), strict=True)
            self._stop.heard(signals)
            if self._losses is not None:
                self._losses.heard(kinds)
            self._settings.check(digests, f"{_CALL} and other settings", _MAY_BE_USED)
            self._calls.check(called, f"{_CALL} and other calls")
            self._modes.check(modes, f"{_CALL} and other modes", _MAY_BE_USED)
            if self._buffers is not None:
                self._buffers.agree(any(writes), f"{_CALL} and a new write to a frozen parameter")
        # Settings on a device are not looked at: the host would wait for it.
        kind = 0.0 if self._losses is None else self._losses.digest()
        wrote = self._buffers is not None and self._buffers.wants_agreement
        alike = [self._settings.digest(), kind, self._calls.take(), self._modes.look()]
        message = [float(self._stop.own), *alike, float(wrote)]
        self._pending = start_gather_numbers(self._control, _CALL, message)
        self._stop.step_done()
