"""Which buffers and frozen parameters the first replica sends to the others: agreed on by all ranks."""

from collections.abc import Callable
from typing import Any

from torch import nn

from hybridpp.cluster import gather_numbers, gather_objects, get_dist_logger
from hybridpp.data_parallel import BufferBroadcast, ShardedWeights, buffers_to_send
from hybridpp_plugins.layout import Layout

_BOOST = "in booster.boost, which looks at buffers"
_STEP = "at the end of a step that wrote to buffers"
_BACKWARD = "in booster.backward, which looks at buffers"


class ReplicaBuffers:
    """The first replica's buffers on all replicas, after each step of training.

    Args:
        broadcast: of this rank's buffers.
        layout: the ranks.
        has_candidates: whether there is anything on any rank that may be sent; else trained parameters are compared.
        has_buffers: whether there are buffers on any rank, and not only parameters.

    Attributes:
        has_buffers: as given.
    """

    def __init__(self, broadcast: BufferBroadcast, layout: Layout, *, has_candidates: bool, has_buffers: bool):
        self._broadcast, self.has_buffers = broadcast, has_buffers
        self._layout = layout
        self._has_agreed = not has_candidates

    def begin(self) -> None:
        """Call before the forward passes of a step. Nothing is communicated."""
        self._broadcast.begin()
        self._broadcast.begin_forward()

    def finish(self) -> None:
        """Send what was agreed on, after the passes. Collective: the replicas of this stage, if there is anything."""
        self._broadcast.end_forward()
        self._broadcast.finish()

    @property
    def wants_agreement(self) -> bool:
        """Whether a forward pass has written here to a buffer that was not written to before."""
        return self._broadcast.wants_agreement

    def agree(self, wanted: bool, call: str = _STEP) -> None:
        """Agree on what is sent from now on, after the first step and when it is ``wanted``.

        Collective: all ranks, with the same argument; nothing is communicated in other steps.

        Raises:
            ConfigError: a buffer differs in shape between replicas; on every rank.
        """
        if self._has_agreed and not wanted:
            return
        self._has_agreed = True
        rows = gather_objects(self._layout.control, call, self._broadcast.described())
        names = {ranks: buffers_to_send([rows[rank] for rank in ranks]) for ranks in self._layout.grid.groups("dp")}
        chosen = sorted({name for found in names.values() for name in found})
        if chosen:
            self._tell(chosen)
        self._broadcast.agree(names[self._layout.dp.ranks])

    def _tell(self, names: list[str]) -> None:
        get_dist_logger().warning(
            f"the forward writes to the {'buffers' if self.has_buffers else 'frozen parameters'} "
            f"{', '.join(names[:3])}{', …' if names[3:] else ''}. After each step, the {self._layout.dp.size} replicas "
            "take those of the first one, as with DistributedDataParallel: what others wrote is lost. If they depend "
            "on the data, all-reduce them over plugin.dp_group in the script. With broadcast_buffers=False each "
            "replica keeps its own buffers.",
            ranks=[0],
        )

    def after_backward(self) -> None:
        """:meth:`finish` and :meth:`agree` for forward passes of the script. Collective: all ranks."""
        self._broadcast.finish()
        if self.has_buffers:
            rows = gather_numbers(self._layout.control, _BACKWARD, [float(self.wants_agreement)])
            self.agree(any(wanted for (wanted,) in rows), _BACKWARD)
        else:  # parameters that a later pass writes to first are told with the next message
            self.agree(False, _BACKWARD)
        self._broadcast.note()

    def around(self, inner: Callable[..., Any] | None) -> Callable[..., Any]:
        """A wrapper of the script's own calls of the model: what the first one writes is found; ``inner`` is inside."""

        def run(forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            if not self._has_agreed:
                self._broadcast.begin()
            self._broadcast.begin_forward()
            try:
                return inner(forward, args, kwargs) if inner else forward(*args, **kwargs)
            finally:
                self._broadcast.end_forward()

        return run


def replica_buffers(
    model: nn.Module, layout: Layout, sharded: ShardedWeights | None, *, with_buffers: bool
) -> ReplicaBuffers | None:
    """For a model that is on its ranks; None: there is one replica. Collective: all ranks."""
    if layout.dp.size == 1:
        return None
    broadcast = BufferBroadcast(model, layout.dp, with_buffers=with_buffers, sharded=sharded)
    rows = gather_numbers(layout.control, _BOOST, [float(broadcast.has_candidates), float(broadcast.has_buffers)])
    has_candidates, has_buffers = map(any, zip(*rows, strict=True))
    return ReplicaBuffers(broadcast, layout, has_candidates=has_candidates, has_buffers=has_buffers)
