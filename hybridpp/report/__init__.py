"""Recorded steps, and the page that shows one. Imports no torch."""

from hybridpp.report.recording import FORMAT, Recording, find_recording, load_recording
from hybridpp.report.records import HELD, Phase, RankAction, RankRecord, RankTraffic, RankWait, StageRecord

__all__ = [
    "FORMAT",
    "HELD",
    "Phase",
    "RankAction",
    "RankRecord",
    "RankTraffic",
    "RankWait",
    "Recording",
    "StageRecord",
    "find_recording",
    "load_recording",
]
