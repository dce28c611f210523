"""Files that a command reads and writes, with one line where that fails."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from hybridpp.errors import ConfigError


@contextmanager
def reading(path: str) -> Iterator[None]:
    """Within it, a failure to read the file is a :class:`~hybridpp.errors.ConfigError`."""
    try:
        yield
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {(error.strerror or str(error)).lower()}.") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} cannot be read: it is no text.") from error


def read(path: str) -> str:
    """The text of a file.

    Raises:
        ConfigError: it cannot be read.
    """
    with reading(path):
        return Path(path).read_text(encoding="utf-8")


def write(path: str, save: Callable[[str], None]) -> str:
    """Let ``save`` write the file; the line that says so.

    Raises:
        ConfigError: it cannot be written.
    """
    try:
        save(path)
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {(error.strerror or str(error)).lower()}.") from error
    return f"wrote {path}"
