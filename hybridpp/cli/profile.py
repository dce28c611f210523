"""``hybridpp profile``: measure this device, and the units of a model on it, for estimates and plans."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from hybridpp.cli.commands.profile import ProfileArguments
from hybridpp.cli.estimate_flags import estimates_layouts, given_model
from hybridpp.cli.output import show, working
from hybridpp.cluster import current_world, join_as_started
from hybridpp.config import Precision
from hybridpp.errors import ConfigError
from hybridpp.estimate import (
    DeviceProfile,
    EstimateInput,
    JobSizes,
    UnitTimes,
    measure_device,
    measure_links,
)


def run(arguments: ProfileArguments) -> None:
    """Print what was measured."""
    path = Path(arguments.output)
    if path.suffix != ".json":
        raise ConfigError(f"--output is a JSON file: got {arguments.output!r}. Use a name that ends in .json.")
    where = torch.device(arguments.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    if where.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError("--device cuda needs a CUDA device, and there is none. Use --device cpu.")
    join_as_started(arguments.address)
    known = DeviceProfile.from_json(path.read_text()) if path.is_file() else None
    with working("measure the device"):
        profile = known or measure_device(where)
    world = current_world()
    if known is None and world.size > 1:
        profile = measure_links(profile, world)
    lines = [] if known else _described(profile, links=world.size > 1)
    if arguments.model is not None:
        with working("measure the model"):
            times = _measured(arguments, profile, where)
        others = tuple(one for one in profile.measured if one.key != times.key)
        profile = replace(profile, measured=(*others, times))
        lines.append(
            f"{times.key}: forward {1e3 * times.loss:,.1f} ms, backward {1e3 * (times.end - times.loss):,.1f} ms"
        )
    if world.rank == 0:
        path.write_text(profile.to_json())
    show(*lines, f"written to {path}: use it as --device {path}")


def _measured(arguments: ProfileArguments, profile: DeviceProfile, where: torch.device) -> UnitTimes:
    model, sample = given_model(arguments)
    given = EstimateInput(
        precision=Precision(arguments.precision),
        device=profile,
        sequence_length=arguments.sequence_length,
        sample=sample,
    )
    settings: dict[str, Any] = {"tp_size": arguments.tp_size, "schedule": arguments.schedule}
    if arguments.recompute:
        settings["gradient_checkpoint_config"] = {}
    sizes = JobSizes(world_size=arguments.tp_size, microbatch_size=arguments.microbatch_size, num_microbatches=1)
    estimator = estimates_layouts().layout_estimator(model, given)
    return estimator.measure_times(sizes, {k: v for k, v in settings.items() if v is not None}, where)


def _described(profile: DeviceProfile, links: bool) -> list[str]:
    speeds = ", ".join(f"{name} {speed:.3g}" for name, speed in profile.tflops.items())
    cores = f", {profile.cores} cores" if profile.cores else ""
    lines = [
        f"{profile.name}: {profile.memory_gib:g} GiB{cores}; TFLOPS {speeds}; {profile.memory_gib_s:.3g} GiB/s; "
        f"{max(profile.op_us, profile.host_us):.1f} us per operator"
    ]
    if links:
        lines.append(f"between ranks: {profile.host_gib_s:.3g} GiB/s, {profile.message_us:.0f} us per message")
    return lines
