"""The programs that run a batch, from the user's schedule: a name, a file, programs or a function."""

from collections.abc import Callable, Sequence
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

from hybridpp.config import PipelineConfig, ZeroConfig
from hybridpp.errors import ConfigError, ScheduleError, some_of
from hybridpp.pipeline import RankProgram, rank_programs
from hybridpp.schedule import (
    Action,
    ActionKind,
    Programs,
    check_on_devices,
    check_program,
    forward_only,
    load_schedule,
    make_schedule,
    parse_action,
    placement,
    stages_placement,
)

Maker = Callable[[int, int], Any]
# Numbers of micro-batches of which the programs of all ranks are kept; an engine keeps more of its own rank.
_MAX_KEPT = 16


class SchedulePlanner:
    """Makes, checks and caches the programs for every number of micro-batches.

    Args:
        config: ``config.schedule`` is a name, a file (CSV or JSON), the programs themselves (actions or their text, one
            row per rank), or a function ``(num_ranks, num_microbatches)`` that returns such programs.
        num_ranks: ranks of the pipeline.
        zero: what replicas divide among themselves; nothing, if there is one.

    Attributes:
        placement: the rank of every stage.

    Raises:
        ScheduleError: the schedule is unknown, does not run, or is for another number of ranks.
    """

    def __init__(self, config: PipelineConfig, num_ranks: int, zero: ZeroConfig | None = None):
        self._zero = zero or ZeroConfig()
        self._num_ranks = num_ranks
        schedule: Any = config.schedule
        self._name = _name_of(schedule)
        self._num_chunks = config.num_model_chunks
        self._example_size = config.num_microbatches or num_ranks
        self._make: Maker
        self._is_known = isinstance(schedule, str) and not _is_file(schedule)
        if self._is_known:
            self.placement = stages_placement(schedule, num_ranks, config.num_model_chunks)
            self._make = lambda p, m: make_schedule(schedule, p, m, config.num_model_chunks)
        else:
            self._make = _maker(schedule)
            if config.num_microbatches is None and not callable(schedule):
                # The schedule has its own number, whatever size a micro-batch is.
                rows = _actions(self._make(num_ranks, self._example_size), self._name)
                self._example_size = 1 + max((action.microbatch or 0 for row in rows for action in row), default=0)
            self.placement = placement(self._checked(self._example_size))
            self._check_chunks()
        self._check_recomputation(config)
        self._training = lru_cache(_MAX_KEPT)(self._plan_training)
        self._max_unsharded: int | None = None
        if self._zero.zero_stage == 3:
            self._max_unsharded = self._zero.num_gathered_stages(len(self.placement) // num_ranks)
        self._evaluation = lru_cache(_MAX_KEPT)(self._plan_evaluation)

    @cached_property
    def splits_backward(self) -> bool:
        """Whether the schedule has separate weight-gradient actions (W)."""
        example = self._checked(self._example_size)
        return any(action.kind is ActionKind.WEIGHT_GRADIENT for program in example for action in program)

    @property
    def is_known(self) -> bool:
        """Whether the schedule is one of those with a name, which are made for any number of micro-batches."""
        return self._is_known

    def compute_programs(self, num_microbatches: int) -> Programs:
        """The schedule's own programs for training, without communication; those with a name are right by themselves.

        Raises:
            ScheduleError: the schedule is for another number of micro-batches.
        """
        if self._is_known:
            return _actions(self._make(self._num_ranks, num_microbatches), self._name)
        return self._checked(num_microbatches)

    def programs(self, num_microbatches: int, training: bool, most: int) -> tuple[RankProgram, ...]:
        """The program of every rank.

        Args:
            num_microbatches: of this replica.
            training: whether there are backward passes.
            most: the largest number of micro-batches of a replica. If replicas communicate in the middle of a step,
                all follow its program.

        Raises:
            ScheduleError: the schedule is for another number of micro-batches.
        """
        return (self._training if training else self._evaluation)(num_microbatches, most)

    def _plan_evaluation(self, own_count: int, num_microbatches: int) -> tuple[RankProgram, ...]:
        programs = forward_only(self.placement, num_microbatches)
        return rank_programs(programs, num_microbatches=own_count, max_unsharded=self._max_unsharded)

    def _plan_training(self, own_count: int, num_microbatches: int) -> tuple[RankProgram, ...]:
        programs = self._checked(num_microbatches)
        if placement(programs) != self.placement:
            raise ScheduleError(
                f"{self._name} must place stages on the same ranks for every number of micro-batches: got "
                f"{placement(programs)} for {num_microbatches}, and the model is cut for {self.placement}. Use one "
                "placement."
            )
        if not self._is_known:
            check_on_devices(programs)
        return rank_programs(
            programs,
            reduces_each=self._zero.reduces_each_microbatch,
            num_microbatches=own_count,
            max_unsharded=self._max_unsharded,
        )

    def _checked(self, num_microbatches: int) -> Programs:
        programs = _actions(self._make(self._num_ranks, num_microbatches), self._name)
        check_program(programs)
        found = 1 + max(action.microbatch or 0 for program in programs for action in program)
        if len(programs) != self._num_ranks or found != num_microbatches:
            raise ScheduleError(
                f"{self._name} is for {len(programs)} ranks and {found} micro-batches: got pp_size={self._num_ranks} "
                f"and a batch of {num_microbatches} micro-batches. Pass a function (num_ranks, num_microbatches), or "
                "use its sizes (drop_last=True skips incomplete batches)."
            )
        return programs

    def _check_chunks(self) -> None:
        chunks, rest = divmod(len(self.placement), self._num_ranks)
        if self._num_chunks is not None and (rest or chunks != self._num_chunks):
            raise ScheduleError(
                f"{self._name} has {len(self.placement)} stages on {self._num_ranks} ranks: got "
                f"num_model_chunks={self._num_chunks}. Leave num_model_chunks out."
            )

    def _check_recomputation(self, config: PipelineConfig) -> None:
        counts = config.recomputation.num_ckpt_layers_per_stage if config.recomputation else None
        if counts is not None and len(counts) != len(self.placement):
            raise ConfigError(
                f"num_ckpt_layers_per_stage needs one number per stage: got {some_of(counts)} with "
                f"{len(self.placement)} stages."
            )


def _is_file(schedule: str) -> bool:
    return Path(schedule).suffix in (".csv", ".json")


def _name_of(schedule: Any) -> str:
    if isinstance(schedule, str | Path):
        return f"schedule {str(schedule)!r}"
    return f"the schedule of {getattr(schedule, '__name__', type(schedule).__name__)}"


def _maker(schedule: Any) -> Maker:
    if isinstance(schedule, str | Path):
        programs = _loaded(Path(schedule))
        return lambda num_ranks, num_microbatches: programs
    if callable(schedule):
        maker: Maker = schedule
        return maker
    return lambda num_ranks, num_microbatches: schedule


def _loaded(path: Path) -> Programs:
    try:
        return load_schedule(path)
    except OSError as error:
        raise ConfigError(
            f"schedule {str(path)!r} cannot be read: {error.strerror}. Pass a CSV or JSON file."
        ) from error


def _actions(programs: Any, name: str) -> Programs:
    """Programs of actions, from rows of actions or of their text."""
    if not isinstance(programs, Sequence) or not all(isinstance(row, Sequence) for row in programs):
        raise ConfigError(
            f"{name} must be one row of actions per rank, like [['0F0', '0B0'], ['1F0', '1B0']]: got {programs!r:.80}."
        )
    rows = [row.split() if isinstance(row, str) else row for row in programs]
    try:
        return tuple(
            tuple(cell if isinstance(cell, Action) else parse_action(str(cell)) for cell in row) for row in rows
        )
    except ScheduleError as error:
        raise ScheduleError(f"{name}: {error}") from None
