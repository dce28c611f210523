"""What a schedule would cost: how long a step takes, which ranks idle, what is held. No torch, no processes."""

from hybridpp.simulate.costs import Costs
from hybridpp.simulate.prepared import PreparedPrograms, PreparedStep, StepEnds
from hybridpp.simulate.search import FoundSchedule, search_schedule
from hybridpp.simulate.shared_cores import ends_on_cores
from hybridpp.simulate.simulate import Simulation, simulate, simulate_draws

__all__ = [
    "Costs",
    "FoundSchedule",
    "PreparedPrograms",
    "PreparedStep",
    "Simulation",
    "StepEnds",
    "ends_on_cores",
    "search_schedule",
    "simulate",
    "simulate_draws",
]
