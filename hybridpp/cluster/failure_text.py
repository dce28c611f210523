"""The text of an error that ends a rank: what it says, and where in the user's code it comes from.

Frames of hybridpp, torch and the standard library are left out, unless the error is one that hybridpp should not have
raised.
"""

import re
import traceback
from collections.abc import Iterator, Sequence
from itertools import groupby

from hybridpp.code_owner import CodeOwner, code_owner
from hybridpp.errors import HybridppError

FULL_TRACEBACK = "HYBRIDPP_FULL_TRACEBACK"
"""The environment variable that shows all frames."""

# Other packages' frames are shown: they hold the models and the datasets of most scripts.
_SHOWN = (CodeOwner.USER, CodeOwner.PACKAGE)
_NUM_FRAMES = 3
_OF_WORKER = "Original Traceback (most recent call last):\n"
_FRAME = re.compile(r'  File "([^"]+)", line \d+')
# Torch's, of a worker that has ended; the second one is caused by the first, if that says how.
_WORKER_ENDED = re.compile(
    r"DataLoader worker \(pid(?:\(s\))? ([\d, ]+)\) (is killed by signal: .*|exited unexpectedly.*)", re.S
)


def failure_text(error: BaseException, rank: int, size: int, *, full: bool = False) -> str:
    """What a rank prints of the error that ends it, some lines.

    Args:
        error: with its traceback.
        rank, size: of the rank, and number of ranks.
        full: whether to show all frames.
    """
    head = f"hybridpp: rank {rank} of {size} failed.\n" if size > 1 else ""
    found = traceback.TracebackException.from_exception(error)
    if full:
        return head + "".join(found.format())
    if isinstance(error, KeyboardInterrupt):
        return _interrupted(found, rank, size)
    if isinstance(error, HybridppError | StopIteration):
        return head + "".join(_of_message(error, found))
    if worker := _in_worker(error):
        return head + "".join(_of_worker(found, *worker))
    if ended := _worker_ended(error.__cause__) or _worker_ended(error):
        return head + "".join(_of_ended_worker(found, *ended))
    if _is_internal(found.stack):
        return head + "".join(found.format())
    return head + "".join(_of_user(found))


def _interrupted(found: traceback.TracebackException, rank: int, size: int) -> str:
    """Ctrl-C in a line: where the script was."""
    own = [frame for frame in found.stack if _owner(frame) is CodeOwner.USER]
    where = f", at {own[-1].filename}:{own[-1].lineno} in {own[-1].name}" if own else ""
    what = f"rank {rank} of {size} was interrupted" if size > 1 else "interrupted"
    return f"hybridpp: {what} (Ctrl-C){where}\n"


def failure_line(error: BaseException) -> str:
    """An error in one line: its class and its text."""
    text = " ".join(str(error).split()) or _without_text(error)
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _of_message(error: BaseException, found: traceback.TracebackException) -> Iterator[str]:
    """An error whose text says all: where the user's code called what raised it, and what it says."""
    cause = found.__cause__
    if cause is not None and not isinstance(error.__cause__, HybridppError) and _inner_user(cause.stack):
        yield from _of_user(cause)
        yield "\nThat is why:\n\n"
    yield from _last_of_user(found)
    yield f"{type(error).__name__}: {error}" + ("" if str(error) else _without_text(error)) + "\n"
    for note in getattr(error, "__notes__", ()):
        yield f"{note}\n"


def _last_of_user(found: traceback.TracebackException) -> Iterator[str]:
    """The innermost frames of the user."""
    for frame in _callers(found.stack):
        yield f'  File "{frame.filename}", line {frame.lineno}, in {frame.name}\n'
        if frame.line:
            yield f"    {frame.line.strip()}\n"


def _callers(stack: Sequence[traceback.FrameSummary]) -> list[traceback.FrameSummary]:
    """The script's innermost frames; of packages that run it, or that it runs, where it has none, or inside of it."""
    own = [number for number, frame in enumerate(stack) if _owner(frame) is CodeOwner.USER]
    packages = [number for number, frame in enumerate(stack) if _owner(frame) is CodeOwner.PACKAGE]
    if not own:
        return [stack[number] for number in packages[-_NUM_FRAMES:]]
    inner = [number for number in packages if number > own[-1]]
    return [stack[number] for number in (*own[-_NUM_FRAMES:], *inner[-1:])]


def _without_text(error: BaseException) -> str:
    if isinstance(error, StopIteration):
        return (
            "the data ended, and the script did not catch it. Take at most len(dataloader) steps from an iterator, "
            "and make a new one for each epoch."
        )
    return ""


def _of_user(found: traceback.TracebackException) -> Iterator[str]:
    """The traceback without frames of libraries; what it was caused by, or happened in, comes before."""
    if found.__cause__ is not None:
        yield from _of_user(found.__cause__)
        yield "\nThe above exception was the direct cause of the following exception:\n\n"
    elif found.__context__ is not None and not found.__suppress_context__:
        yield from _of_user(found.__context__)
        yield "\nDuring handling of the above exception, another exception occurred:\n\n"
    yield "Traceback (most recent call last):\n"
    for is_shown, group in groupby(found.stack, lambda frame: _owner(frame) in _SHOWN):
        frames = list(group)
        if is_shown:
            yield from traceback.StackSummary.from_list(frames).format()
        else:
            names = " and ".join(sorted({_owner(frame) for frame in frames}))
            yield f"  [{len(frames)} frame{'s' if len(frames) > 1 else ''} of {names}: {FULL_TRACEBACK}=1 shows them]\n"
    yield from found.format_exception_only()


def _in_worker(error: BaseException) -> tuple[str, str] | None:
    """Of an error in a worker of a dataloader, where it was caught, and its traceback; torch puts both in the text."""
    caught, found, trace = str(error).partition(_OF_WORKER)
    return (caught, trace) if found and "DataLoader worker" in caught else None


def _of_worker(found: traceback.TracebackException, caught: str, trace: str) -> Iterator[str]:
    """The user's frames, on the rank and in its worker, and the error."""
    yield "Traceback (most recent call last):\n"
    yield from traceback.StackSummary.from_list([one for one in found.stack if _owner(one) in _SHOWN]).format()
    yield f"{' '.join(caught.split())}\n"
    is_shown = True
    for line in trace.splitlines():
        frame = _FRAME.match(line)
        if frame:
            is_shown = code_owner(frame[1]) in _SHOWN
        elif not line.startswith("    "):
            is_shown = True
        if is_shown and line:
            yield f"{line}\n"
    yield "hybridpp: with num_workers=0 the dataset runs in the rank itself, where a debugger can stop.\n"


def _worker_ended(error: BaseException | None) -> tuple[str, str] | None:
    """Of an error that torch raises where a worker of a dataloader has ended, the worker's number and how it ended."""
    found = _WORKER_ENDED.match(str(error)) if isinstance(error, RuntimeError) else None
    return (found[1].strip(), " ".join(found[2].split()).removeprefix("is ").rstrip(".")) if found else None


def _of_ended_worker(found: traceback.TracebackException, number: str, how: str) -> Iterator[str]:
    """What is known of a worker that has ended; the error comes wherever the rank is at that moment."""
    yield from _last_of_user(found)
    yield (
        f"RuntimeError: a worker that loads data for this rank (process {number}) has ended: {how}. Where nobody "
        "killed it, the kernel's log tells whether the host ran out of memory (fewer workers, or a smaller "
        "prefetch_factor, take less) or native code in the dataset failed; a bus error is a full /dev/shm.\n"
    )


def _is_internal(stack: Sequence[traceback.FrameSummary]) -> bool:
    """Whether hybridpp, and not code of the user that it called, raised or made torch raise."""
    return any(_owner(frame) is CodeOwner.HYBRIDPP for frame in stack) and not _inner_user(stack)


def _inner_user(stack: Sequence[traceback.FrameSummary]) -> bool:
    """Whether hybridpp called code of the user there, or of a package that has their model."""
    owners = [_owner(frame) for frame in stack]
    if CodeOwner.HYBRIDPP not in owners:
        return False
    return any(owner in _SHOWN for owner in owners[owners.index(CodeOwner.HYBRIDPP) :])


def _owner(frame: traceback.FrameSummary) -> CodeOwner:
    return code_owner(frame.filename, frame.name)
