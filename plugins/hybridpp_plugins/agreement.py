"""One failure is a failure on all ranks, so that none waits for another."""

from hybridpp.cluster import Group, gather_objects
from hybridpp.errors import CheckpointError, ConfigError, DeadlockError, PeerError, RefusedByPeerError

_KNOWN = {"CheckpointError": CheckpointError, "ConfigError": ConfigError}


def agree(control: Group, call: str, failure: Exception | None, what: str) -> None:
    """Raise on all ranks if one rank failed, with its reason. Collective: all ranks of ``control``.

    Args:
        control: all ranks.
        call: that this rank is in, see :mod:`hybridpp.cluster.gather_numbers`.
        failure: of this rank. A lost peer is not agreed on: a rank that another one waits for may not wait itself.
        what: failed, as the subject of a sentence.

    Raises:
        Exception: ``failure``, if it is one; else of the same class if the failure of the first rank that failed is a
            :class:`~hybridpp.errors.CheckpointError` or :class:`~hybridpp.errors.ConfigError`, else a
            :class:`~hybridpp.errors.RefusedByPeerError`.
    """
    if isinstance(failure, PeerError | DeadlockError) and not isinstance(failure, RefusedByPeerError):
        raise failure  # who still waits for this rank in what it has left would not come here
    own = None if failure is None else [type(failure).__name__, str(failure)]
    rows = enumerate(gather_objects(control, call, own))
    failed = [(rank, row) for rank, row in rows if row is not None]
    if failure is not None:
        raise failure
    if failed:
        rank, (kind, text) = failed[0]
        if kind in _KNOWN:
            raise _KNOWN[kind](f"{what} failed on rank {rank}: {text}")
        raise RefusedByPeerError(f"{what} failed on rank {rank}: {text.rstrip('.')}. See the error printed there.")
