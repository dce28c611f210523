"""The limits of a watchdog."""

import math
import re

import pytest

from hybridpp.cluster.watchdog_limits import WatchdogLimits
from hybridpp.errors import ConfigError


def test_a_number_is_the_limit_of_steps_and_of_data():
    limits = WatchdogLimits.of(60, 600.0)
    assert (limits.step, limits.data, limits.setup, limits.save, limits.script) == (60, 60, 1800, 1800, math.inf)


def test_a_wait_is_reported_before_it_ends_by_the_jobs_time_limit():
    limits = WatchdogLimits.of({"step": 60, "data": 300}, 600.0)
    assert limits.of_section("script", is_awaited=True) == 540
    assert limits.of_section("setup", is_awaited=True) == 540
    assert limits.of_section("setup", is_awaited=False) == 1800
    assert limits.of_section("data", is_awaited=True) == 300


def test_a_script_for_which_nobody_waits_may_take_any_time():
    assert WatchdogLimits.of({"step": 60, "script": 90}, 600.0).of_section("script", is_awaited=False) == math.inf


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (0, "watchdog_s is a number of seconds above 0: got 0 for step"),
        ({"step": 5, "lunch": 3}, "watchdog_s has limits of script, setup, data, step, save: got one of 'lunch'"),
        ({"data": 5}, "watchdog_s needs a limit of a step"),
        (600, "got 600 s for a step and timeout_s=600. Use at most 540 s, or raise timeout_s."),
    ],
)
def test_limits_that_cannot_work_are_refused(given, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        WatchdogLimits.of(given, 600.0)
