"""Schedules by name."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from hybridpp.errors import ScheduleError, shown
from hybridpp.schedule.action import Programs
from hybridpp.schedule.building_block import v_half, v_min
from hybridpp.schedule.counts import check_counts
from hybridpp.schedule.eager_1f1b import eager_1f1b
from hybridpp.schedule.gpipe import gpipe
from hybridpp.schedule.interleaved import interleaved
from hybridpp.schedule.one_f_one_b import one_f_one_b
from hybridpp.schedule.stage_placement import looped, v_shaped
from hybridpp.schedule.zb_v import zb_v
from hybridpp.schedule.zero_bubble import interleaved_zero_bubble, zb_h1, zb_h2


@dataclass(frozen=True, kw_only=True)
class ScheduleEntry:
    """A named schedule.

    Attributes:
        name: the name that users pass.
        make: ``make(num_ranks, num_microbatches, num_chunks)`` gives its programs.
        placement: ``placement(num_ranks, num_chunks)`` gives the rank of each stage.
        num_chunks: default number of stages per rank.
        takes_chunks: whether users can choose another number.
        summary: what it is good for, in a few words.
    """

    name: str
    make: Callable[[int, int, int], Programs]
    placement: Callable[[int, int], tuple[int, ...]]
    num_chunks: int
    takes_chunks: bool
    summary: str

    def choose_chunks(self, num_chunks: int | None) -> int:
        """The number of stages per rank, given the user's choice (None: the default).

        Raises:
            ScheduleError: the schedule has a fixed number of chunks, or the number is below 1.
        """
        if num_chunks is None or num_chunks == self.num_chunks:
            return self.num_chunks
        if not self.takes_chunks:
            free = ", ".join(repr(entry.name) for entry in SCHEDULES.values() if entry.takes_chunks)
            raise ScheduleError(
                f"schedule {self.name!r} has {self.num_chunks} stage{'s' * (self.num_chunks > 1)} per rank: got "
                f"num_model_chunks={num_chunks}. Leave it out, or use one of {free}."
            )
        if num_chunks < 1:
            raise ScheduleError(f"a rank needs at least one stage: got num_model_chunks={num_chunks}. Use 1 or more.")
        return num_chunks


_ENTRIES = (
    ScheduleEntry(
        name="gpipe",
        make=gpipe,
        placement=looped,
        num_chunks=1,
        takes_chunks=True,
        summary="all forwards, then all backwards; holds every activation",
    ),
    ScheduleEntry(
        name="1f1b",
        make=lambda num_ranks, num_microbatches, _: one_f_one_b(num_ranks, num_microbatches),
        placement=looped,
        num_chunks=1,
        takes_chunks=False,
        summary="holds the fewest activations",
    ),
    ScheduleEntry(
        name="eager-1f1b",
        make=lambda num_ranks, num_microbatches, _: eager_1f1b(num_ranks, num_microbatches),
        placement=looped,
        num_chunks=1,
        takes_chunks=False,
        summary="runs further ahead, splits only the last backwards; holds twice as much",
    ),
    ScheduleEntry(
        name="interleaved",
        make=interleaved,
        placement=looped,
        num_chunks=2,
        takes_chunks=True,
        summary="1F1B with several stages per rank; idles less, sends more",
    ),
    ScheduleEntry(
        name="zb-h1",
        make=lambda num_ranks, num_microbatches, _: zb_h1(num_ranks, num_microbatches),
        placement=looped,
        num_chunks=1,
        takes_chunks=False,
        summary="1F1B with split backwards; idles a third as long",
    ),
    ScheduleEntry(
        name="zb-h2",
        make=lambda num_ranks, num_microbatches, _: zb_h2(num_ranks, num_microbatches),
        placement=looped,
        num_chunks=1,
        takes_chunks=False,
        summary="no idle time between steps that overlap; holds twice as much as zb-h1",
    ),
    ScheduleEntry(
        name="interleaved-zb",
        make=interleaved_zero_bubble,
        placement=looped,
        num_chunks=2,
        takes_chunks=True,
        summary="interleaved with split backwards; idles least with many chunks",
    ),
    ScheduleEntry(
        name="zb-v",
        make=lambda num_ranks, num_microbatches, _: zb_v(num_ranks, num_microbatches),
        placement=lambda num_ranks, _: v_shaped(num_ranks),
        num_chunks=2,
        takes_chunks=False,
        summary="two stages per rank in a V, split backwards; 1F1B's memory",
    ),
    ScheduleEntry(
        name="v-half",
        make=lambda num_ranks, num_microbatches, _: v_half(num_ranks, num_microbatches),
        placement=lambda num_ranks, _: v_shaped(num_ranks),
        num_chunks=2,
        takes_chunks=False,
        summary="zb-v with half of 1F1B's activations; idles about half as long as 1F1B",
    ),
    ScheduleEntry(
        name="v-min",
        make=lambda num_ranks, num_microbatches, _: v_min(num_ranks, num_microbatches),
        placement=lambda num_ranks, _: v_shaped(num_ranks),
        num_chunks=2,
        takes_chunks=False,
        summary="zb-v with a third of 1F1B's activations; idles less than 1F1B",
    ),
)

SCHEDULES: Mapping[str, ScheduleEntry] = MappingProxyType({entry.name: entry for entry in _ENTRIES})
"""Every named schedule."""

# Other spellings of the names, without dashes; class names of torch and PiPPy are among them, without "Schedule" and
# "PipelineDriver".
_ALIASES = {
    "filldrain": "gpipe",
    "interleaved1f1b": "interleaved",
    "interleavedzerobubble": "interleaved-zb",
    "loopedbfs": "gpipe",
    "zbvzerobubble": "zb-v",
}


def find_schedule(name: str) -> ScheduleEntry:
    """The schedule of a name, which may be torch's or PiPPy's; case, dashes and underscores are ignored.

    Raises:
        ScheduleError: there is none.
    """
    plain = name.lower().replace("-", "").replace("_", "")
    plain = plain.removeprefix("schedule").removeprefix("pipelinedriver")
    wanted = _ALIASES.get(plain, plain)
    for entry in SCHEDULES.values():
        if wanted in (entry.name, entry.name.replace("-", "")):
            return entry
    raise ScheduleError(f"unknown schedule {shown(name)}. Use one of {', '.join(map(repr, SCHEDULES))}.")


def make_schedule(name: str, num_ranks: int, num_microbatches: int, num_chunks: int | None = None) -> Programs:
    """The programs of a schedule by its name.

    Args:
        name: one of ``SCHEDULES``, or another spelling of it.
        num_ranks: ranks of the pipeline.
        num_microbatches: micro-batches per batch.
        num_chunks: stages per rank; None: the schedule's default.

    Raises:
        ScheduleError: the name is unknown, or the schedule does not allow these sizes.
    """
    entry = find_schedule(name)
    return entry.make(num_ranks, num_microbatches, entry.choose_chunks(num_chunks))


def stages_placement(name: str, num_ranks: int, num_chunks: int | None = None) -> tuple[int, ...]:
    """The rank of each stage under a schedule; it does not depend on the number of micro-batches.

    Raises:
        ScheduleError: the name is unknown, or the schedule does not allow this number of chunks.
    """
    entry = find_schedule(name)
    chunks = entry.choose_chunks(num_chunks)
    check_counts(num_ranks=num_ranks, num_chunks=chunks)
    return entry.placement(num_ranks, chunks)
