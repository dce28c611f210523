"""How other libraries' data-parallel plugins become settings of HybridParallelPlugin."""

import inspect
from collections.abc import Callable, Mapping
from difflib import get_close_matches
from typing import Any, NamedTuple

from hybridpp.cluster import check_joined, current_world
from hybridpp.config import ParallelConfig, require_bools, require_plain
from hybridpp.errors import ConfigError
from hybridpp_plugins.hybrid_parallel import HybridParallelPlugin
from hybridpp_plugins.unsupported import UnsupportedSetting, refuse_value

Conversion = Callable[[Mapping[str, Any]], dict[str, Any]]
"""Settings, from a preset's arguments by name."""

FP8 = UnsupportedSetting((False,), "Use precision='bf16'. ")
NORM_TYPE = UnsupportedSetting((2.0, 2), "Gradients are clipped to their L2 norm. ")
MASTER_WEIGHTS = UnsupportedSetting((True,), "Half-precision weights are updated in fp32. ")
LOSS_SCALE = (
    *("initial_scale", "min_scale", "growth_factor", "backoff_factor", "growth_interval", "hysteresis", "max_scale"),
)
"""Keywords of the fp16 loss scale, as HybridParallelPlugin has them."""


class Preset(NamedTuple):
    """What becomes of the keywords of a plugin.

    Attributes:
        takes: keywords that become settings: the setting's name, or a function that gives several.
        hints: keywords without an effect, because every value gives what it asks for.
        refused: keywords that are accepted only with values that have no effect.
    """

    takes: Mapping[str, str | Conversion]
    hints: frozenset[str] = frozenset()
    refused: Mapping[str, UnsupportedSetting] = {}

    def settings(self, preset: type[HybridParallelPlugin], given: Mapping[str, Any]) -> dict[str, Any]:
        """The settings that the arguments of a preset come to.

        Args:
            preset: the class.
            given: its arguments by name, those in ``more`` aside.

        Raises:
            ConfigError: an argument is wrong, or asks for what there is not.
        """
        require_plain(**given)
        switches = [p.name for p in inspect.signature(preset).parameters.values() if isinstance(p.default, bool)]
        require_bools(**{name: given[name] for name in switches})
        for name, setting in self.refused.items():
            refuse_value(name, given[name], setting)
        settings: dict[str, Any] = {}
        for name, target in self.takes.items():
            settings |= {target: given[name]} if isinstance(target, str) else target(given)
        return settings


def same(*names: str) -> dict[str, str]:
    """Keywords that HybridParallelPlugin has under the same names."""
    return {name: name for name in names}


def given_to(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments by name, from ``locals()`` at the start of ``__init__``."""
    return {name: value for name, value in arguments.items() if name not in ("self", "more", "__class__")}


def with_more(preset: type[HybridParallelPlugin], settings: dict[str, Any], more: Mapping[str, Any]) -> dict[str, Any]:
    """``settings`` of a preset, and the user's further ones, which may not be of both.

    Raises:
        ConfigError: a name is unknown, or the preset sets it.
    """
    own = [name for name in inspect.signature(preset).parameters if name != "more"]
    engine = [name for name in inspect.signature(HybridParallelPlugin).parameters if name != "other"]
    known = sorted({*own, *engine} - (settings.keys() - set(own)))
    for name in more:
        if name in settings:
            raise ConfigError(
                f"{preset.__name__} sets {name}={settings[name]!r} itself: got {name}={more[name]!r}. Leave it out, or "
                "use HybridParallelPlugin."
            )
        if name not in known:
            near = get_close_matches(name, known, n=1)
            raise ConfigError(
                f"{preset.__name__} has no setting {name!r}. It takes: {', '.join(known)}."
                + (f" Did you mean {near[0]}?" if near else "")
            )
    return {**settings, **more}


def zero_size_of(given: Mapping[str, Any]) -> dict[str, Any]:
    """``zero_size``, from the number of copies that ``extra_dp_size`` asks for, and ``tp_size`` if there is one.

    Raises:
        ConfigError: the number does not divide that of the replicas.
    """
    copies = given["extra_dp_size"]
    if isinstance(copies, bool) or not isinstance(copies, int) or copies < 1:
        raise ConfigError(f"extra_dp_size must be an integer of at least 1: got extra_dp_size={copies!r}.")
    if copies == 1:
        return {}
    check_joined()
    num_replicas = ParallelConfig(tp_size=given.get("tp_size", 1)).dp_size(current_world().size)
    if num_replicas % copies:
        raise ConfigError(
            f"extra_dp_size must divide the number of replicas: got extra_dp_size={copies} with {num_replicas} "
            "replicas. Leave it out to divide over all of them."
        )
    return {"zero_size": num_replicas // copies}
