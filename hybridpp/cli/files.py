"""Files that a command reads and writes; failures become one-line errors."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from hybridpp.errors import ConfigError


@contextmanager
def reading(path: str) -> Iterator[None]:
    """Turn failures to read the file into :class:`~hybridpp.errors.ConfigError`; a device may have no end."""
    try:
        if Path(path).is_char_device() or Path(path).is_block_device():
            raise ConfigError(f"{path} cannot be read: it is a device. Pass a file.")
        yield
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {(error.strerror or str(error)).lower()}.") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} cannot be read: it is not a text file.") from error


def read(path: str) -> str:
    """The text of a file.

    Raises:
        ConfigError: it cannot be read.
    """
    with reading(path):
        return Path(path).read_text(encoding="utf-8")


def write(path: str, save: Callable[[str], None]) -> str:
    """Write a file by ``save``; returns the line to print.

    Raises:
        ConfigError: it cannot be written.
    """
    try:
        save(path)
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {(error.strerror or str(error)).lower()}.") from error
    return f"wrote {path}"
