"""Communication between ranks of one host through shared memory: an optional replacement of gloo's TCP.

From the bottom up: ``linux.py`` (system calls), ``arena.py`` (a rank's memory for one peer), ``message_log.py`` (what
is in it), ``peer_process.py`` (waking the peer, and whether it lives), ``spinning.py`` (waiting awake), ``link.py``
(messages between two ranks), ``group.py`` (collectives), ``socket_rendezvous.py`` and ``connect.py`` (how the ranks of
a group connect).
"""

from hybridpp.cluster.shared_memory.connect import connect, why_impossible
from hybridpp.cluster.shared_memory.group import PendingSum, SharedMemoryGroup, sum_in_order

__all__ = ["PendingSum", "SharedMemoryGroup", "connect", "sum_in_order", "why_impossible"]
