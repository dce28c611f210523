"""Errors in passes that the script runs itself, which it may catch and go on, on one rank alone."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from hybridpp.cluster import gather_numbers, name_ranks
from hybridpp.errors import DeadlockError, PeerError, UnlikeCallsError, named
from hybridpp_plugins.interruption import Interruption
from hybridpp_plugins.layout import Layout


class FailedPass:
    """The last forward or backward pass of the script's own that an error ended here.

    Other ranks that got through it wait for this one in its collectives, or have sent messages for them. So nothing
    that communicates may follow, unless all ranks failed alike, and as far on: then all are at the same place.

    Args:
        layout: the ranks.

    Attributes:
        interruption: notes a peer that was lost, after which other calls are refused, too.
    """

    def __init__(self, layout: Layout):
        self.interruption = Interruption()
        self._layout = layout
        # The call, and how many collectives it had begun; None: there is none that ranks have not agreed on.
        self._failed: tuple[str, int] | None = None
        self._why: str | None = None

    @contextmanager
    def noted(self, call: str, *, communicates: bool) -> Iterator[None]:
        """A context for a pass.

        Args:
            call: what it is, in words.
            communicates: whether ranks meet in it, also if it had not come to that here.
        """
        before = self._layout.num_collectives
        try:
            yield
        except (PeerError, DeadlockError) as error:
            self._why = named(error)
            self.interruption.lost_peer(error, "a pass")
            raise
        except BaseException:
            begun = self._layout.num_collectives - before
            if self._layout.world.size > 1 and (communicates or begun):
                self._failed = call, begun
            raise

    def finish(self) -> None:
        """Before the next call: make sure that all ranks failed. Collective: all ranks, if this one did.

        Raises:
            UnlikeCallsError: they did not, or not alike; or a peer was lost.
        """
        if self._failed is not None:
            (call, begun), self._failed = self._failed, None
            try:
                rows = gather_numbers(self._layout.control, f"after an error in {call}", [float(begun)])
            except (PeerError, DeadlockError, UnlikeCallsError) as error:
                self._why = named(error)
                if not isinstance(error, UnlikeCallsError):
                    self.interruption.lost_peer(error, "a pass")
                raise
            if unlike := [rank for rank, row in enumerate(rows) if row != rows[0]]:
                self._why = f"an error in {call}, which came elsewhere on {name_ranks(unlike)} than on rank 0"
        if self._why is not None:
            raise UnlikeCallsError(
                f"a pass ended in the middle on this rank, by {self._why}. Other ranks may still be in it, and its "
                "messages on their way, so nothing can follow it. Let the error end the process, and resume from a "
                "checkpoint. Errors of booster.backward can be caught on all ranks alike only."
            )

    def around(self, inner: Callable[..., Any] | None) -> Callable[..., Any]:
        """A wrapper of the script's own calls of the model, which copies share; ``inner`` wraps them inside."""

        def run(forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            self.finish()
            with self.noted("a call of the model", communicates=False):
                return inner(forward, args, kwargs) if inner else forward(*args, **kwargs)

        return run
