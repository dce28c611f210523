"""A headless Chromium, driven over its own pipe: no package is needed, only a browser that is installed."""

import fcntl
import json
import os
import shutil
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

_NAMES = ("chromium", "chromium-browser", "chrome-headless-shell", "google-chrome", "google-chrome-stable")
_FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run", "--hide-scrollbars"),
    *("--disable-background-networking", "--disable-component-update", "--disable-extensions", "--disable-sync"),
    *("--host-resolver-rules=MAP * ~NOTFOUND", "--remote-debugging-pipe", "about:blank"),
)
NO_BROWSER = f"there is no browser: install one of {', '.join(_NAMES)}"


def find_browser() -> str | None:
    """The path of a browser of this host; None: there is none."""
    return next((path for name in _NAMES if (path := shutil.which(name))), None)


class Page:
    """A tab; its commands are those of the Chrome DevTools Protocol.

    Attributes:
        requested: URLs that it asked for, with those of its documents.
        complaints: errors of its scripts, and what it wrote to the console.
    """

    def __init__(self, commands: Any, answers: Any):
        self._commands, self._answers = commands, answers
        self._number, self._session = 0, ""
        self._events: list[dict[str, Any]] = []
        self.requested: list[str] = []
        self.complaints: list[str] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Network", "Runtime", "Log"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """The result of a command."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        self._commands.write(json.dumps(message).encode() + b"\0")
        self._commands.flush()
        while (answer := self._read()).get("id") != self._number:
            pass
        if "error" in answer:
            raise AssertionError(f"{method}: {answer['error']}")
        return answer["result"]

    def _read(self) -> dict[str, Any]:
        text = bytearray()
        while (byte := self._answers.read(1)) != b"\0":
            if not byte:
                raise AssertionError("the browser has ended")
            text += byte
        message = json.loads(text)
        self._note(message)
        return message

    def _note(self, message: dict[str, Any]) -> None:
        parameters = message.get("params", {})
        match message.get("method"):
            case "Network.requestWillBeSent":
                self.requested.append(parameters["request"]["url"])
            case "Runtime.exceptionThrown":
                self.complaints.append(str(parameters["exceptionDetails"]))
            case "Runtime.consoleAPICalled":
                self.complaints.append(str(parameters["args"]))
            case "Log.entryAdded":
                self.complaints.append(parameters["entry"]["text"])
            case "Page.loadEventFired":
                self._events.append(message)

    def open(self, path: Path, *, dark: bool = False, size: tuple[int, int] = (1366, 768)) -> None:
        """Load a file, on a screen of this size, and wait until it is there."""
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        width, height = size
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        self._events.clear()
        self.call("Page.navigate", url=path.resolve().as_uri())
        while not self._events:
            self._read()
        self.settle()

    def settle(self) -> None:
        """Wait until what was to be drawn is drawn."""
        self.run("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(() => done(0))))")

    def run(self, script: str) -> Any:
        """The value of an expression in the page."""
        result = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in result, result["exceptionDetails"]
        return result["result"].get("value")

    def press(self, key: str) -> None:
        """Press and release a key."""
        text = {"text": key} if len(key) == 1 else {}
        self.call("Input.dispatchKeyEvent", type="keyDown", key=key, **text)
        self.call("Input.dispatchKeyEvent", type="keyUp", key=key)
        self.settle()

    def mouse(self, kind: str, x: float, y: float, **more: Any) -> None:
        """An event of the mouse: ``mouseMoved``, ``mousePressed``, ``mouseReleased``, ``mouseWheel``."""
        self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, **more)
        self.settle()


@contextmanager
def browser_page(folder: Path) -> Iterator[Page]:
    """A tab of a new browser, whose files are in ``folder``; the test is skipped where there is no browser."""
    browser = find_browser()
    if browser is None:
        pytest.skip(NO_BROWSER)
    read_commands, write_commands = _pipe()
    read_answers, write_answers = _pipe()
    command = [browser, f"--user-data-dir={folder / 'profile'}", *_FLAGS]
    log = str(folder / "browser.log")
    actions = [
        (os.POSIX_SPAWN_OPEN, 1, log, os.O_WRONLY | os.O_CREAT, 0o600),
        (os.POSIX_SPAWN_DUP2, 1, 2),
        # The browser reads commands from descriptor 3, and writes answers to 4.
        (os.POSIX_SPAWN_DUP2, read_commands, 3),
        (os.POSIX_SPAWN_DUP2, write_answers, 4),
    ]
    pid = os.posix_spawn(browser, command, os.environ, file_actions=actions)
    os.close(read_commands)
    os.close(write_answers)
    try:
        with os.fdopen(write_commands, "wb") as commands, os.fdopen(read_answers, "rb") as answers:
            yield Page(commands, answers)
    finally:
        os.kill(pid, signal.SIGTERM)
        os.waitpid(pid, 0)


def _pipe() -> tuple[int, int]:
    """The ends of a pipe, none of which is one of the descriptors that a browser has."""
    ends = os.pipe()
    moved = tuple(fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, 10) for end in ends)
    for end in ends:
        os.close(end)
    return moved[0], moved[1]
