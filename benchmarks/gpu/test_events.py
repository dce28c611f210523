"""A plugin of pytest that prints what happens, for run_tests.py of this folder: a line of JSON for each event."""

import json
from typing import Any

_EVENT = "hybridpp test: "
_failures: dict[str, str] = {}
_results: dict[str, str] = {}
_seconds: dict[str, float] = {}


def _say(**event: Any) -> None:
    print(f"\n{_EVENT}{json.dumps(event)}", flush=True)


def pytest_collection_modifyitems(config: Any, items: list[Any]) -> None:
    """All tests are known."""
    if config.option.collectonly:
        _say(collected=[item.nodeid for item in items])


def pytest_runtest_logstart(nodeid: str) -> None:
    """A test starts."""
    _say(started=nodeid)


def pytest_runtest_logreport(report: Any) -> None:
    """A part of a test (set-up, call, end) is over."""
    name = report.nodeid
    _seconds[name] = _seconds.get(name, 0.0) + report.duration
    if _results.get(name) != "failed" and (report.when == "call" or report.outcome != "passed"):
        _results[name] = report.outcome
    if report.outcome == "failed":
        _failures[name] = str(report.longrepr)[-400:]
    elif report.outcome == "skipped":
        _failures[name] = str(report.longrepr[-1] if isinstance(report.longrepr, tuple) else report.longrepr)


def pytest_runtest_logfinish(nodeid: str) -> None:
    """A test is over."""
    said = {"said": _failures[nodeid]} if nodeid in _failures else {}
    _say(ended=nodeid, result=_results.get(nodeid, "passed"), seconds=round(_seconds.get(nodeid, 0.0), 1), **said)
