"""Schedules as values: what each rank computes, in which order. No torch in here."""

from hybridpp.schedule.action import Action, Kind, Program, Programs, placement
from hybridpp.schedule.check import check_program
from hybridpp.schedule.gpipe import gpipe
from hybridpp.schedule.lower import lower
from hybridpp.schedule.one_f_one_b import forward_only, one_f_one_b
from hybridpp.schedule.render import parse_action, peak_in_flight, render

__all__ = [
    "Action",
    "Kind",
    "Program",
    "Programs",
    "check_program",
    "forward_only",
    "gpipe",
    "lower",
    "one_f_one_b",
    "parse_action",
    "peak_in_flight",
    "placement",
    "render",
]
