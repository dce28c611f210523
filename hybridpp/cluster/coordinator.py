"""Helpers for scripts that run on every rank: act on one rank only, or on one rank first."""

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, ParamSpec, TypeVar, overload

from hybridpp.cluster.current import current_world
from hybridpp.cluster.gather_numbers import gather_numbers
from hybridpp.cluster.launch import check_joined
from hybridpp.cluster.torch_world import leave_job

P = ParamSpec("P")
T = TypeVar("T")


class DistCoordinator:
    """This rank's position in the job, and ways to act on some ranks only.

    Without a job, it is rank 0 of 1.

    Attributes:
        rank: this process among all.
        world_size: number of processes.
        local_rank: this process among those of its host, as the call that joined the job gave it. In a job that the
            script joined by itself: as torchrun, mpirun or srun left it in the environment, else ``rank``.

    Raises:
        LaunchError: torchrun or mpirun started this process as one of several, and it has not joined them.

    Example:
        >>> coordinator = DistCoordinator()
        >>> coordinator.print_on_master(f"training on {coordinator.world_size} ranks")
        training on 1 ranks
    """

    def __init__(self) -> None:
        check_joined()
        world = current_world()
        self.rank = world.rank
        self.world_size = world.size
        self.local_rank = world.local_rank
        self._world = world

    def is_master(self) -> bool:
        """Whether this is rank 0."""
        return self.rank == 0

    def is_node_master(self) -> bool:
        """Whether this is the first rank of its host."""
        return self.local_rank == 0

    def print_on_master(self, message: object) -> None:
        """Print on rank 0 only."""
        if self.is_master():
            print(message, flush=True)  # noqa: T201

    @overload
    def on_master_only(self, function: Callable[P, T]) -> Callable[P, T | None]: ...
    @overload
    def on_master_only(self) -> Callable[[Callable[P, T]], Callable[P, T | None]]: ...
    def on_master_only(self, function: Callable[P, T] | None = None) -> Any:
        """Decorate a function to run on rank 0 only and return None on the others; with or without parentheses."""
        if function is None:
            return self.on_master_only

        @functools.wraps(function)
        def wrapper(*args: P.args, **kwargs: P.kwargs) -> T | None:
            return function(*args, **kwargs) if self.is_master() else None

        return wrapper

    @contextmanager
    def priority_execution(self, executor_rank: int = 0) -> Iterator[None]:
        """Run the block on ``executor_rank`` first, then on all others (for example to fill a cache).

        Collective: every rank must enter it.
        """
        if self.rank != executor_rank:
            self.block_all()
        try:
            yield
        finally:
            if self.rank == executor_rank:
                self.block_all()

    def block_all(self) -> None:
        """Host barrier over all ranks; pending device work is not waited for. Collective: all ranks."""
        gather_numbers(self._world.control(), "in DistCoordinator.block_all", [])

    def destroy(self) -> None:
        """Leave the job, and release the threads, descriptors and memory of every group.

        A process that ends without it may abort in a backend's threads. Every rank calls it, when its last
        communication is over. Plugins cannot be used afterwards; another job can be launched.
        """
        leave_job()
