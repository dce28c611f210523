"""The estimate of one layout, and what makes such estimates."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import torch
from torch import nn

from hybridpp.config import Precision
from hybridpp.estimate.devices import DeviceProfile
from hybridpp.estimate.rank_memory import RankState, StepPeak
from hybridpp.estimate.step_time import StepTime
from hybridpp.estimate.unit_times import UnitTimes
from hybridpp.simulate import Costs


class RankEstimate(NamedTuple):
    """Memory of the ranks at one place of the pipeline.

    Attributes:
        position: in the pipeline.
        stages: that they run.
        state: what they hold all through training.
        step: what they hold of a step's micro-batches, when that is most.
    """

    position: int
    stages: tuple[int, ...]
    state: RankState
    step: StepPeak

    @property
    def update(self) -> int:
        """How much more the optimizer's update takes than the micro-batches: 0 where they take more."""
        return max(0, self.state.update - self.step.total)

    @property
    def total(self) -> int:
        """Bytes of a rank at the peak."""
        return self.state.total + self.step.total + self.update


@dataclass(frozen=True, kw_only=True)
class JobSizes:
    """Sizes of a job.

    Attributes:
        world_size: ranks.
        microbatch_size: samples of a micro-batch.
        num_microbatches: of a replica in a step.
    """

    world_size: int
    microbatch_size: int
    num_microbatches: int


@dataclass(frozen=True, kw_only=True)
class LayoutEstimate:
    """What one layout of a job would take.

    Attributes:
        sizes: of the job.
        settings: keywords of the plugin.
        num_replicas: of the model.
        ranks: memory of the ranks at each place of the pipeline.
        time: of a step.
        is_measured: whether the times of units were measured.
        alike: settings of other layouts of a search that take as long, and hold as much or more.
    """

    sizes: JobSizes
    settings: Mapping[str, Any]
    num_replicas: int
    ranks: tuple[RankEstimate, ...]
    time: StepTime
    is_measured: bool = False
    alike: tuple[Mapping[str, Any], ...] = ()

    @property
    def worst(self) -> RankEstimate:
        """The ranks that hold most."""
        return max(self.ranks, key=lambda rank: rank.total)

    @property
    def global_batch(self) -> int:
        """Samples of a step."""
        return self.sizes.microbatch_size * self.sizes.num_microbatches * self.num_replicas

    @property
    def samples_per_s(self) -> float:
        """Samples of all replicas in a second."""
        return 1e3 * self.global_batch / self.time.step_ms if self.time.step_ms else 0.0


class ScheduleCosts(NamedTuple):
    """What a search for a schedule of one layout is given.

    Attributes:
        costs: of each stage, also if it recomputes its blocks.
        room: bytes of each rank of a pipeline for micro-batches.
        num_blocks: of each stage.
    """

    costs: Costs
    room: tuple[int, ...]
    num_blocks: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class EstimateInput:
    """What is estimated, beside the layout.

    Attributes:
        precision: of training.
        device: that computes.
        num_moments: states of the optimizer for each weight: 2 of Adam, 1 of SGD with momentum.
        sequence_length: tokens of a text; None: what the model's configuration suggests.
        images: of each text, if batches are made.
        sample: a batch; None: batches are made from the configuration of a transformers model.
        criterion: of outputs and a micro-batch; None: the model's own loss, else a mean of its outputs.
        settings: keywords of the plugin that all layouts have.
    """

    precision: Precision
    device: DeviceProfile
    num_moments: int = 2
    sequence_length: int | None = None
    images: int = 1
    sample: Any = field(default=None, repr=False)
    criterion: Any = None
    settings: Mapping[str, Any] = field(default_factory=dict)


class LayoutEstimator(Protocol):
    """Estimates layouts of one model."""

    @property
    def num_blocks(self) -> int:
        """Blocks of the model: a pipeline has no more stages."""

    @property
    def given(self) -> EstimateInput:
        """What is estimated."""

    @property
    def notes(self) -> tuple[str, ...]:
        """Lines for people: what the micro-batches have of images, and what they lack that the model takes."""

    def bound_ms(self, sizes: JobSizes, settings: Mapping[str, Any]) -> float:
        """A time that a step cannot go below: quick, for a search."""

    def least_bytes(self, sizes: JobSizes, settings: Mapping[str, Any]) -> int:
        """Bytes that the worst rank holds at least: quick, for a search."""

    def quick_estimate(self, sizes: JobSizes, settings: Mapping[str, Any], memory_bytes: int) -> LayoutEstimate:
        """The estimate of a layout in milliseconds, without padding of buckets; without a time if it does not fit.

        Args:
            sizes, settings: as of :meth:`estimate`.
            memory_bytes: of a device.
        """

    def measure_times(self, sizes: JobSizes, settings: Mapping[str, Any], where: torch.device) -> UnitTimes:
        """When the units of a layout run on a device, measured with random weights; the complete model must fit there.

        Args:
            sizes, settings: as of :meth:`estimate`.
            where: the device.
        """

    def schedule_costs(self, sizes: JobSizes, settings: Mapping[str, Any], memory_bytes: int) -> ScheduleCosts:
        """What a search for the schedule of a layout needs.

        Args:
            sizes, settings: as of :meth:`estimate`; a schedule says how many stages a rank has, and recomputation does
                not count.
            memory_bytes: of a device.
        """

    def estimate(self, sizes: JobSizes, settings: Mapping[str, Any]) -> LayoutEstimate:
        """The estimate of a layout.

        Args:
            sizes: of the job.
            settings: keywords of the plugin.

        Raises:
            ConfigError: settings do not go together.
            PartitionError: the model cannot be cut so.
        """


class EstimatesLayouts(ABC):
    """A plugin whose layouts can be estimated: ``hybridpp estimate`` and ``plan`` need it."""

    @classmethod
    @abstractmethod
    def layout_estimator(cls, model: nn.Module, given: EstimateInput) -> LayoutEstimator:
        """What estimates layouts of a model; the model does not change.

        Args:
            model: on any device, also the meta device; its values are not read.
            given: what is estimated, beside the layouts.
        """
