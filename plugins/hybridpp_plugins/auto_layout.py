"""The settings of the fastest layout of a model on a job's ranks."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Self

import torch
from torch import nn

from hybridpp.cluster import World, check_joined, current_world, get_dist_logger
from hybridpp.config import Precision
from hybridpp.errors import ConfigError
from hybridpp.estimate import (
    DEVICES,
    DeviceProfile,
    EstimateInput,
    EstimatesLayouts,
    LayoutEstimator,
    SearchSpace,
    find_device,
    plugin_call,
    plugin_keywords,
    search,
)
from hybridpp.sizes import parse_bytes
from hybridpp_plugins.find_tp_plan import of_first_rank

_GIB = 2**30
# Keywords that the search chooses.
_CHOSEN = (
    *("tp_size", "pp_size", "num_microbatches", "microbatch_size", "schedule", "zero_stage"),
    "gradient_checkpoint_config",
)


@dataclass(frozen=True, kw_only=True)
class AutoLayout:
    """What a layout is chosen for.

    Attributes:
        global_batch: samples of a step, over all replicas.
        memory: that a rank may use; None: nine tenths of the device's.
        device: a name, or a measured profile; None: known by the name of the CUDA device, or the CPU's.
        sequence_length: tokens of a text.
        sample: a batch; None: made from the model's configuration.
    """

    global_batch: int
    memory: int | str | None = None
    device: str | DeviceProfile | None = None
    sequence_length: int | None = None
    sample: Any = None


def auto_keywords(
    make_estimator: Callable[[nn.Module, EstimateInput], LayoutEstimator],
    model: nn.Module,
    world: World,
    wanted: AutoLayout,
    settings: Mapping[str, Any],
) -> Mapping[str, Any]:
    """Keywords of the plugin for the fastest layout that fits.

    Rank 0 searches for all ranks. Collective: all ranks; two all-gathers of host memory.

    Args:
        make_estimator: makes the estimator of the plugin.
        model: to be trained; it does not change.
        world: the job.
        wanted: what the layout is for.
        settings: other keywords of the plugin.

    Raises:
        ConfigError: nothing fits, or a keyword is one that the search chooses.
    """
    taken = [name for name in settings if name in _CHOSEN]
    if taken:
        raise ConfigError(
            f"auto chooses {', '.join(_CHOSEN)}: got {taken[0]}. Leave it out, or make the plugin with all of them."
        )
    profile = wanted.device if isinstance(wanted.device, DeviceProfile) else _profile_of(wanted.device, world.device)
    given = EstimateInput(
        precision=Precision(settings.get("precision") or "fp32"),
        device=profile,
        sequence_length=wanted.sequence_length,
        sample=wanted.sample,
        settings={name: value for name, value in settings.items() if name != "precision"},
    )
    limit = wanted.memory
    memory_bytes = int(0.9 * profile.memory_gib * _GIB) if limit is None else parse_bytes("memory", limit)
    space = SearchSpace(num_devices=world.size, memory_bytes=memory_bytes, global_batch=wanted.global_batch, num_kept=1)

    def find() -> Mapping[str, Any]:
        best = search(make_estimator(model, given), space).best[0]
        get_dist_logger().info(
            f"chose {plugin_call(best, str(given.precision))}: {best.worst.total / _GIB:.2f} GiB of a rank",
            ranks=[0],
        )
        return plugin_keywords(best, str(given.precision))

    return of_first_rank(find, world.control())


def _profile_of(name: str | None, device: torch.device) -> DeviceProfile:
    if name is not None:
        return find_device(name)
    if device.type != "cuda":
        return DEVICES["cpu"]
    own = torch.cuda.get_device_name(device)
    for known, marks in (("h100", ("H100", "H200", "GH200")), ("a100", ("A100",)), ("rtx4090", ("4090",))):
        if any(mark in own for mark in marks):
            memory = torch.cuda.get_device_properties(device).total_memory / _GIB
            return replace(DEVICES[known], memory_gib=memory, devices_per_host=max(1, torch.cuda.device_count()))
    raise ConfigError(
        f"the speed of {own} is not known. Measure it with hybridpp profile, and pass "
        "device=DeviceProfile.from_json(text), or the name of a similar one: h100, a100, rtx4090."
    )


class ChoosesLayout(EstimatesLayouts):
    """A plugin that can choose its layout."""

    @classmethod
    def auto(
        cls,
        model: nn.Module,
        *,
        global_batch: int,
        memory: int | str | None = None,
        device: str | DeviceProfile | None = None,
        sequence_length: int | None = None,
        sample: Any = None,
        **settings: Any,
    ) -> Self:
        """The plugin with the fastest layout of a model on the job's ranks that fits in their memory.

        What ``hybridpp plan`` prints first. The layout is chosen from estimates; the model does not change.

        Collective: all ranks of the world; rank 0 searches, which may take a minute.

        Args:
            model: with weights, or on the meta device.
            global_batch: samples of a step, over all replicas: each replica gets ``global_batch / dp_size`` of them.
            memory: that a rank's tensors may take: bytes, or text such as ``"72GiB"``; None: 9/10 of the device's.
            device: ``"h100"``, ``"a100"``, ``"rtx4090"``, ``"cpu"``, or a measured
                :class:`~hybridpp.estimate.DeviceProfile`; None: found by the device's name.
            sequence_length: tokens of a text; None: what the model's configuration suggests.
            sample: a batch; None: made from the configuration of a transformers model.
            **settings: other keywords of this class, such as ``precision`` and ``max_norm``.

        Raises:
            ConfigError: nothing fits, with the layout that needs least; or a keyword is one that is chosen.
        """
        check_joined()
        wanted = AutoLayout(
            global_batch=global_batch, memory=memory, device=device, sequence_length=sequence_length, sample=sample
        )
        return cls(**auto_keywords(cls.layout_estimator, model, current_world(), wanted, settings))
