"""What ended a step in the middle on this rank, so that nothing may follow."""

from collections.abc import Callable
from typing import NoReturn

from hybridpp.errors import DeadlockError, PeerError, UnlikeCallsError


class Interruption:
    """The error that ended a step in the middle on this rank, for all models of a plugin.

    Other ranks may be in that step, or its messages come later: what follows would take them for its own.

    Args:
        give_up: called when a peer is lost in the optimizer.

    Attributes:
        cause: the error, in words; None: there was none.
    """

    def __init__(self, give_up: Callable[[], None] = lambda: None):
        self.cause: str | None = None
        self._give_up = give_up

    def note(self, error: BaseException) -> None:
        """Note the error."""
        self.cause = f"{type(error).__name__}: {error}"

    def lost_peer(self, error: PeerError | DeadlockError) -> None:
        """Note an error of the optimizer's communication."""
        self.note(error)
        self._give_up()

    def refuse(self) -> NoReturn:
        """Refuse what would follow."""
        raise UnlikeCallsError(
            f"a step ended in the middle on this rank, by {self.cause}. Other ranks may still be in that "
            "step, and its messages on their way, so nothing can follow it. Let the error end the process, and "
            "resume from a checkpoint. To leave out a batch, check it before booster.execute_pipeline, on all "
            "ranks alike."
        )
