"""Which buffers the first replica sends to the others: agreed on by all ranks, for ``broadcast_buffers=True``."""

from torch import nn

from hybridpp.cluster import gather_numbers, gather_objects, get_dist_logger
from hybridpp.data_parallel import BufferBroadcast, buffers_to_send
from hybridpp_plugins.layout import Layout

_BOOST = "in booster.boost, which looks at buffers"
_STEP = "at the end of a step that wrote to buffers"
_BACKWARD = "in booster.backward, which looks at buffers"


class ReplicaBuffers:
    """The first replica's buffers on all replicas, after each step of training.

    Args:
        broadcast: of this rank's buffers.
        layout: the ranks.
    """

    def __init__(self, broadcast: BufferBroadcast, layout: Layout):
        self._broadcast = broadcast
        self._layout = layout
        self._has_agreed = False

    def begin(self) -> None:
        """Call before the forward passes of a step. Nothing is communicated."""
        self._broadcast.begin()

    def finish(self) -> None:
        """Send what was agreed on, after the passes. Collective: the replicas of this stage, if there is anything."""
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
            f"the forward writes to the buffers {', '.join(names[:3])}{', …' if names[3:] else ''}. After each step, "
            f"the {self._layout.dp.size} replicas take those of the first one, as with DistributedDataParallel: what "
            "others wrote is lost. If they depend on the data, all-reduce them over plugin.dp_group in the script. "
            "With broadcast_buffers=False each replica keeps its own.",
            ranks=[0],
        )

    def after_backward(self) -> None:
        """:meth:`finish` and :meth:`agree` for forward passes of the script. Collective: all ranks."""
        self.finish()
        rows = gather_numbers(self._layout.control, _BACKWARD, [float(self.wants_agreement)])
        self.agree(any(wanted for (wanted,) in rows), _BACKWARD)
        self._broadcast.note()


def replica_buffers(model: nn.Module, layout: Layout, is_on: bool) -> ReplicaBuffers | None:
    """For a model that is on its ranks; None: it has no such buffer anywhere. Collective: all ranks."""
    if not is_on or layout.dp.size == 1:
        return None
    broadcast = BufferBroadcast(model, layout.dp)
    rows = gather_numbers(layout.control, _BOOST, [float(broadcast.has_candidates)])
    return ReplicaBuffers(broadcast, layout) if any(has for (has,) in rows) else None
