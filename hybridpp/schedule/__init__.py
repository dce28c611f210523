"""Schedules as values: what each rank computes, in which order. Imports no torch."""

from hybridpp.schedule.action import Action, ActionKind, Program, Programs
from hybridpp.schedule.building_block import Offsets, v_from_offsets, v_half, v_min
from hybridpp.schedule.check import check_program
from hybridpp.schedule.device_model import STRICTEST, DeviceModel, Drains, Streams, check_on_devices, find_deadlock
from hybridpp.schedule.eager_1f1b import eager_1f1b
from hybridpp.schedule.files import load_schedule, save_schedule
from hybridpp.schedule.forward_only import forward_only
from hybridpp.schedule.gpipe import gpipe
from hybridpp.schedule.interleaved import interleaved
from hybridpp.schedule.lower import first_microbatches, lower
from hybridpp.schedule.memory import peak_activations
from hybridpp.schedule.one_f_one_b import one_f_one_b
from hybridpp.schedule.registry import SCHEDULES, ScheduleEntry, find_schedule, make_schedule, stages_placement
from hybridpp.schedule.render import parse_action, render, render_grid
from hybridpp.schedule.send_lifetimes import CompletedSends, completed_sends
from hybridpp.schedule.split_backward import fill_weight_gradients
from hybridpp.schedule.stage_placement import looped, placement, v_shaped
from hybridpp.schedule.unshard import with_unshards
from hybridpp.schedule.zb_v import zb_v
from hybridpp.schedule.zero_bubble import interleaved_zero_bubble, zb_h1, zb_h2

__all__ = [
    "SCHEDULES",
    "STRICTEST",
    "Action",
    "ActionKind",
    "CompletedSends",
    "DeviceModel",
    "Drains",
    "Offsets",
    "Program",
    "Programs",
    "ScheduleEntry",
    "Streams",
    "check_on_devices",
    "check_program",
    "completed_sends",
    "eager_1f1b",
    "fill_weight_gradients",
    "find_deadlock",
    "find_schedule",
    "first_microbatches",
    "forward_only",
    "gpipe",
    "interleaved",
    "interleaved_zero_bubble",
    "load_schedule",
    "looped",
    "lower",
    "make_schedule",
    "one_f_one_b",
    "parse_action",
    "peak_activations",
    "placement",
    "render",
    "render_grid",
    "save_schedule",
    "stages_placement",
    "v_from_offsets",
    "v_half",
    "v_min",
    "v_shaped",
    "with_unshards",
    "zb_h1",
    "zb_h2",
    "zb_v",
]
