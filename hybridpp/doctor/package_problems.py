"""Problems of the packages that are installed."""

from collections.abc import Iterator

from hybridpp.doctor.packages import OLDEST, is_older
from hybridpp.doctor.problem import Problem
from hybridpp.doctor.rank_facts import RankFacts

# What the library itself imports; the others serve single commands, formats or examples.
_ALWAYS = ("torch",)


def package_problems(facts: RankFacts) -> Iterator[Problem]:
    """Of one rank."""
    for name, oldest in OLDEST.items():
        found = facts.versions.get(name)
        if found is None:
            yield Problem(
                level="hint",
                what=f"{name} is not installed.",
                way_out=f"What needs it says so; pip install '{name}>={oldest}' adds it.",
            )
        elif is_older(found, oldest):
            yield Problem(
                level="error",
                what=f"{name} must be {oldest} or newer: got {found}.",
                way_out=f"Run pip install --upgrade '{name}>={oldest}'.",
            )
    if facts.torchvision:
        yield Problem(
            level="error",
            what=f"torchvision {facts.versions.get('torchvision', '')} cannot be imported beside torch "
            f"{facts.versions['torch']}, and transformers imports it for models of images: {facts.torchvision}.",
            way_out="Install the torchvision of the same release and the same index as torch, or pip uninstall "
            "torchvision.",
        )
    yield from _cuda_problems(facts)
    if not facts.builds["gloo"]:
        yield Problem(
            level="error",
            what="this build of torch has no gloo, which ranks use for messages in host memory.",
            way_out="Install a build of torch from PyPI or pytorch.org.",
        )


def _cuda_problems(facts: RankFacts) -> Iterator[Problem]:
    driver = facts.host.nvidia_driver
    if driver is None or facts.devices:
        return
    cuda = facts.builds["cuda"]
    if facts.environment.get("CUDA_VISIBLE_DEVICES") in ("", "-1"):
        yield Problem(
            level="warning",
            what="this host has an NVIDIA driver, and CUDA_VISIBLE_DEVICES hides its devices: jobs compute on the CPU.",
            way_out="Unset it to use them.",
        )
    elif not cuda:
        yield Problem(
            level="error",
            what=f"this host has an NVIDIA driver ({driver}), and torch {facts.versions['torch']} was built for the "
            "CPU: jobs compute there.",
            way_out="Install torch for CUDA from pytorch.org.",
        )
    else:
        why = f": {facts.no_device}" if facts.no_device else ""
        yield Problem(
            level="error",
            what=f"torch was built for CUDA {cuda} and finds no device beside the NVIDIA driver {driver}{why}.",
            way_out="Where nvidia-smi shows devices, the driver is too old for this CUDA: update it, or install torch "
            "for an older CUDA; in a container, pass the devices to it.",
        )
