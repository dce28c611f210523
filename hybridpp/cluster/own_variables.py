"""Variables of the environment that this process sets for the job that it is in, and takes back when it leaves."""

from collections.abc import MutableMapping


class OwnVariables:
    """Those of one process.

    Args:
        environment: of the process.
    """

    def __init__(self, environment: MutableMapping[str, str]):
        self._environment = environment
        self._own: dict[str, str] = {}

    def set(self, name: str, value: str) -> str:
        """Set a variable, unless the user has; returns what it is now."""
        if name not in self._environment or self.has(name):
            self._environment[name] = self._own[name] = value
        return self._environment[name]

    def has(self, name: str) -> bool:
        """Whether a variable is as this process has set it."""
        return name in self._own and self._environment.get(name) == self._own[name]

    def drop(self) -> None:
        """Take back what still is as it was set."""
        for name in filter(self.has, list(self._own)):
            del self._environment[name]
        self._own.clear()
