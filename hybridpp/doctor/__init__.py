"""Examines an installation, its hosts, and the links between the ranks of a job.

From the bottom up: ``packages.py``, ``host.py`` and ``devices.py`` (facts of this process), ``rank_facts.py`` (all of
them, of every rank), ``link_speed.py`` (messages between ranks), ``package_problems.py``, ``host_problems.py`` and
``job_problems.py`` (what is wrong, and the way out: functions of the facts), ``known_problems.py`` (all of them),
``report.py`` (everything).
"""

from hybridpp.doctor.problem import Problem
from hybridpp.doctor.rank_facts import RankFacts
from hybridpp.doctor.report import DoctorReport, examine

__all__ = ["DoctorReport", "Problem", "RankFacts", "examine"]
