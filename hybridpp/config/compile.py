"""Compilation of a model's blocks by ``torch.compile``."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hybridpp.config.base import ConfigBase
from hybridpp.errors import ConfigError, shown

_KEYWORDS = ("backend", "dynamic", "fullgraph", "mode", "options")


@dataclass(frozen=True, kw_only=True)
class CompileConfig(ConfigBase):
    """Whether the blocks of the model run compiled.

    Attributes:
        compile_blocks: whether ``torch.compile`` compiles each block, equal blocks once; or a dict of its keywords
            (``backend``, ``dynamic``, ``fullgraph``, ``mode``, ``options``): ``{"mode": "max-autotune"}``. A block
            that is not one graph is an error, unless ``{"fullgraph": False}`` is given or its layers are sharded.

    Example:
        >>> CompileConfig(compile_blocks=True).keywords()
        {'fullgraph': True}
    """

    compile_blocks: bool | Mapping[str, Any] = False

    def __post_init__(self) -> None:
        super().__post_init__()
        given: Any = self.compile_blocks
        if isinstance(given, bool):
            return
        if not isinstance(given, Mapping) or not set(given) <= set(_KEYWORDS):
            raise ConfigError(
                f"compile_blocks must be True, False, or a dict of torch.compile's {', '.join(_KEYWORDS)}: got "
                f"compile_blocks={shown(given)}."
            )

    @property
    def is_on(self) -> bool:
        """Whether blocks are compiled; an empty dict compiles them, too."""
        return self.compile_blocks is not False

    @property
    def asks_for_full_graph(self) -> bool:
        """Whether ``fullgraph=True`` was given."""
        return isinstance(self.compile_blocks, Mapping) and bool(self.compile_blocks.get("fullgraph"))

    def keywords(self, full_graph: bool = True) -> dict[str, Any]:
        """The keywords of ``torch.compile``; ``full_graph`` counts where ``fullgraph`` was not given."""
        return {"fullgraph": full_graph, **(self.compile_blocks if isinstance(self.compile_blocks, Mapping) else {})}
