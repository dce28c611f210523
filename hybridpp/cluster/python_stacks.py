"""Python stacks of the threads of this process, and of one whose interpreter is held by code in C."""

import contextlib
import faulthandler
import os
import signal
import sys
import tempfile
import threading
import time
import traceback
from pathlib import Path
from types import FrameType

from hybridpp.cluster.rank_process import RankProcess
from hybridpp.code_owner import CodeOwner, code_owner

# A compiler works while one of its entry points is on a stack; while compiled code runs, none is.
_COMPILER = ("torch/_dynamo/convert_frame.py", "torch/_inductor/compile_fx.py")
_MAX_FRAMES, _MAX_FRAMES_OF_OTHERS, _MAX_FRAMES_OF_WORKERS = 30, 3, 10
_MAX_WORKERS = 16
# A real-time signal that nothing else is known to use.
DUMP_SIGNAL = int(signal.SIGRTMIN) + 9 if hasattr(signal, "SIGRTMIN") else 0
_DUMP_S, _LOOK_S = 1.0, 0.02


def user_code(thread: int) -> str:
    """Where a thread is in the user's code, as ``train.py:57 in main``; empty if it is in none."""
    frame = sys._current_frames().get(thread)
    while frame is not None:
        code = frame.f_code
        if _is_users(frame):
            return f"{_shortened(code.co_filename)}:{frame.f_lineno} in {code.co_name}"
        frame = frame.f_back
    return ""


def _is_users(frame: FrameType) -> bool:
    code = frame.f_code
    if code_owner(code.co_filename, code.co_name) is not CodeOwner.USER:
        return False
    # Dataclasses and others make code of text, and run it while a module is imported: who runs it is whose it is.
    is_text = (code.co_filename, code.co_name) == ("<string>", "<module>")
    return not is_text or frame.f_back is None or _is_users(frame.f_back)


def has_ended(thread: int) -> bool:
    """Whether a script has come to its end in the main thread, where Python waits for its other threads."""
    frame = sys._current_frames().get(thread)
    while frame is not None:
        if frame.f_code is threading._shutdown.__code__:  # type: ignore[attr-defined]
            return True
        frame = frame.f_back
    return False


def is_compiling() -> bool:
    """Whether torch compiles something in a thread of this process."""
    return any(_is_compiling(frame) for frame in sys._current_frames().values())


def stacks(thread: int, besides: str) -> str:
    """The stack of a thread, innermost call last, and where the other threads are.

    Args:
        thread: its identifier.
        besides: threads whose names begin so are left out.
    """
    frames = sys._current_frames()
    names = {one.ident: one.name for one in threading.enumerate()}
    text = _text(frames[thread], _MAX_FRAMES) if thread in frames else "  its thread has ended\n"
    for other, frame in frames.items():
        name = names.get(other, f"thread {other}")
        if other != thread and not name.startswith(besides):
            text += f"and of its thread {name}:\n{_text(frame, _MAX_FRAMES_OF_OTHERS)}"
    return text


class StackDump:
    """Lets other processes of the host see this one's Python stacks, even while code in C holds its interpreter.

    Such a process runs no Python code: neither a thread nor a handler. The handler that ``faulthandler`` installs is in
    C; it writes to a file without a name, which others open through ``/proc``.

    Attributes:
        descriptor: of the file in this process; -1: the system has no such signal, or somebody handles it already.
    """

    def __init__(self) -> None:
        self.descriptor = -1
        if not DUMP_SIGNAL or signal.getsignal(DUMP_SIGNAL) != signal.SIG_DFL:
            return
        self._file = tempfile.TemporaryFile()  # noqa: SIM115  # open as long as the handler is installed
        faulthandler.register(DUMP_SIGNAL, self._file, all_threads=True)
        self.descriptor = self._file.fileno()

    def close(self) -> None:
        """Take the handler off; may be called again."""
        if self.descriptor >= 0:
            self.descriptor = -1
            faulthandler.unregister(DUMP_SIGNAL)
            self._file.close()


def dump_of(process: RankProcess, descriptor: int, holder: RankProcess | None = None) -> str:
    """The stacks that a process writes which has a :class:`StackDump`; empty if it writes none within 1 s.

    Args:
        process: of this host.
        descriptor: of the file.
        holder: in which process; None: in that one. Processes that are forked from it write to the same file.
    """
    path = Path(f"/proc/{(holder or process).pid}/fd/{descriptor}")
    before, text, until = "", "", time.monotonic() + _DUMP_S
    with contextlib.suppress(OSError):
        start = path.stat().st_size if descriptor >= 0 else 0
        if descriptor < 0 or not process.send(DUMP_SIGNAL):
            return ""
        while time.monotonic() < until:
            before, text = text, path.read_bytes()[start:].decode(errors="replace")
            # It is complete when it has stopped growing.
            if text and text == before:
                break
            time.sleep(_LOOK_S)
    return text.removesuffix("\n") + "\n" if text else ""


def worker_stacks(process: RankProcess, descriptor: int) -> dict[str, str]:
    """The stacks of workers of data loaders that are at work, by the numbers of their processes, innermost call last.

    Left out are those that wait for something to do, and of which nothing can be seen: stopped ones, and those that are
    no forks.

    Args:
        process: that started them.
        descriptor: of its :class:`StackDump`.
    """
    found = {}
    for child in process.children[:_MAX_WORKERS]:
        if not child.condition and child.catches(DUMP_SIGNAL):
            stack = _of_worker(dump_of(child, descriptor, process))
            if stack:
                found[str(child.pid)] = stack
    return found


def _of_worker(dump: str) -> str:
    """What a worker does, from its dump; empty if it waits for an index, or is no worker."""
    for thread in dump.split("\n\n"):
        frames = [line for line in thread.splitlines() if line.startswith("  File ")]
        loop = next((index for index, line in enumerate(frames) if line.endswith("in _worker_loop")), 0)
        if loop and not frames[loop - 1].endswith("in get"):
            return "\n".join(reversed(frames[:loop][:_MAX_FRAMES_OF_WORKERS]))
    return ""


def _text(frame: FrameType, limit: int) -> str:
    summary = traceback.extract_stack(frame)
    left_out = f"  … {len(summary) - limit} calls further out\n" if len(summary) > limit else ""
    return left_out + "".join(traceback.format_list(summary[-limit:]))


def _is_compiling(frame: FrameType | None) -> bool:
    while frame is not None:
        if frame.f_code.co_filename.endswith(_COMPILER):
            return True
        frame = frame.f_back
    return False


def _shortened(path: str) -> str:
    """A path relative to the working directory, if it is below that."""
    with contextlib.suppress(ValueError, OSError):
        return str(Path(path).relative_to(os.getcwd()))
    return path
