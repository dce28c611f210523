"""``hybridpp profile``: measure this device, and the units of a model on it, for estimates and plans."""

from argparse import ArgumentParser, Namespace
from dataclasses import replace
from pathlib import Path

import torch

from hybridpp.cli.argtypes import positive
from hybridpp.cli.estimate_flags import PLUGIN, model_of
from hybridpp.cluster import current_world
from hybridpp.config import Precision
from hybridpp.errors import ConfigError
from hybridpp.estimate import (
    DeviceProfile,
    EstimateInput,
    EstimatesLayouts,
    JobSizes,
    UnitTimes,
    measure_device,
    measure_links,
)
from hybridpp.plugin import plugin_class


def add_arguments(parser: ArgumentParser) -> None:
    """Declare the flags."""
    parser.epilog = "Under torchrun, with two processes or more, the links between them are measured, too."
    parser.add_argument("--output", metavar="FILE", default="device.json", help="to write or to add to (device.json)")
    parser.add_argument("--model", help="also measure the units of this model: folder with a config.json, or hub name")
    parser.add_argument("--task", help="CausalLM, ImageClassification, ...; default: the class in config.json")
    parser.add_argument("--precision", choices=tuple(map(str, Precision)), default="bf16", help="default: bf16")
    parser.add_argument("--tp-size", type=positive, default=1, help="tensor-parallel ranks (default: 1)")
    parser.add_argument("--microbatch-size", type=positive, default=1, help="samples of a micro-batch (default: 1)")
    parser.add_argument("--sequence-length", type=positive, help="tokens of a text (default: 128, or what fits)")
    parser.add_argument("--recompute", action="store_true", help="with all blocks recomputed")
    parser.add_argument("--schedule", help="of which it will be part: some split the backward pass")
    parser.add_argument("--device", choices=("cpu", "cuda"), help="default: cuda, if there is one")


def run(arguments: Namespace) -> str:
    """Returns what was measured."""
    path = Path(arguments.output)
    if path.suffix != ".json":
        raise ConfigError(f"--output is a JSON file: got {arguments.output!r}. Use a name that ends in .json.")
    where = torch.device(arguments.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    if where.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError("--device cuda needs a CUDA device, and there is none. Use --device cpu.")
    known = DeviceProfile.from_json(path.read_text()) if path.is_file() else None
    profile = known or measure_device(where)
    world = current_world()
    if known is None and world.size > 1:
        profile = measure_links(profile, world)
    lines = [] if known else _described(profile, links=world.size > 1)
    if arguments.model is not None:
        times = _measured(arguments, profile, where)
        others = tuple(one for one in profile.measured if one.key != times.key)
        profile = replace(profile, measured=(*others, times))
        lines.append(
            f"{times.key}: forward {1e3 * times.loss:,.1f} ms, backward {1e3 * (times.end - times.loss):,.1f} ms"
        )
    if world.rank == 0:
        path.write_text(profile.to_json())
    return "\n".join([*lines, f"written to {path}: use it as --device {path}"])


def _measured(arguments: Namespace, profile: DeviceProfile, where: torch.device) -> UnitTimes:
    plugin = plugin_class(PLUGIN)
    assert issubclass(plugin, EstimatesLayouts), "it comes with hybridpp"
    given = EstimateInput(
        precision=Precision(arguments.precision), device=profile, sequence_length=arguments.sequence_length
    )
    settings = {"tp_size": arguments.tp_size, "schedule": arguments.schedule}
    if arguments.recompute:
        settings["gradient_checkpoint_config"] = {}
    sizes = JobSizes(world_size=arguments.tp_size, microbatch_size=arguments.microbatch_size, num_microbatches=1)
    estimator = plugin.layout_estimator(model_of(arguments), given)
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
