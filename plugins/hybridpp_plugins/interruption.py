"""What ended a call in the middle on this rank, so that nothing may follow."""

from collections.abc import Callable
from typing import NoReturn

from hybridpp.errors import DeadlockError, PeerError, RefusedByPeerError, UnlikeCallsError, named

_LEAVE_OUT = " To leave out a batch, check it before booster.execute_pipeline, on all ranks alike."


class Interruption:
    """The error that ended a step or another call in the middle on this rank, for all models of a plugin.

    Other ranks may be in that call, or its messages come later: what follows would take them for its own.

    Args:
        give_up: called when a peer is lost: a save in the background is not to wait for it.

    Attributes:
        cause: the error, in words; None: there was none.
    """

    def __init__(self, give_up: Callable[[], None] = lambda: None):
        self.cause: str | None = None
        self._call = ""
        self._give_up = give_up

    def note(self, error: BaseException, call: str = "a step") -> None:
        """Note the error that ended ``call``."""
        self._call, self.cause = call, named(error)

    def lost_peer(self, error: PeerError | DeadlockError, call: str = "a step") -> None:
        """Note an error of communication; where a step has noted one before, that stays.

        Not so one with which all ranks have left the call, for the reason of one of them: the script may go on.
        """
        if isinstance(error, RefusedByPeerError):
            return
        if self.cause is None:
            self.note(error, call)
        self._give_up()

    def refuse(self) -> NoReturn:
        """Refuse what would follow."""
        is_step = self._call == "a step"
        raise UnlikeCallsError(
            f"{self._call} ended in the middle on this rank, by {self.cause}. Other ranks may still be in that "
            f"{'step' if is_step else 'call'}, and its messages on their way, so nothing can follow it. Let the error "
            f"end the process, and resume from a checkpoint.{_LEAVE_OUT if is_step else ''}"
        )
