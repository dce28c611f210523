"""How fast devices and the links between them are: made up of data sheets, or measured."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

from hybridpp.errors import ConfigError, shown, text_of
from hybridpp.estimate.unit_times import UnitTimes
from hybridpp.strict_json import parse_strictly

_GIB = 2**30


@dataclass(frozen=True, kw_only=True)
class DeviceProfile:
    """Speeds of one device, and of the links to others.

    Attributes:
        name: of the device.
        memory_gib: of the device.
        tflops: of large matrix products, by format: what is reached, not what the data sheet says.
        memory_gib_s: what element-wise operators read and write in a second.
        op_us: time of an operator on numbers so few that they take none.
        host_us: time that the host takes for an operator; while it computes on a device, the host goes on.
        host_gib_s: one way, between two devices of a host, while all communicate.
        network_gib_s: one way, between hosts, of each device, while all communicate.
        message_us: time of a message without content.
        sum_us: time of a sum over ranks without content; None: as a message.
        sum_gib_s: of a sum of large tensors, counted as a ring moves them; None: that of the links.
        update_gib_s: what the optimizer's update reads and writes in a second; None: as other operators.
        kernels: rates of fused kernels, by name. ``"pointwise"`` (GiB/s): element-wise operators and reductions
            between products are one kernel each, as torch.compile or hand-written kernels make of norms, rotary
            embeddings, gated activations and losses. ``"attention"`` and ``"attention_backward"`` (TFLOPS in half
            precision): of attention that keeps no weights. ``"experts"`` (TFLOPS in half precision): of products in
            groups. What is not named is not joined, or is as fast as other products.
        devices_per_host: how many are linked by ``host_gib_s``.
        cores: how many ranks of a host compute at once; None: all, as each has a device.
        sources: of the numbers, by the names of attributes: for readers.
        measured: times of the units of models, as ``hybridpp profile --model`` measured them.
    """

    name: str
    memory_gib: float
    tflops: Mapping[str, float]
    memory_gib_s: float
    op_us: float
    host_us: float = 0.0
    host_gib_s: float
    network_gib_s: float
    message_us: float = 10.0
    sum_us: float | None = None
    sum_gib_s: float | None = None
    update_gib_s: float | None = None
    kernels: Mapping[str, float] = field(default_factory=dict)
    devices_per_host: int = 8
    cores: int | None = None
    sources: Mapping[str, str] = field(default_factory=dict, repr=False)
    measured: tuple[UnitTimes, ...] = field(default=(), repr=False)

    def __post_init__(self) -> None:
        numbers = {one.name: getattr(self, one.name) for one in fields(self) if one.name not in _OTHERS}
        for table in ("tflops", "kernels"):
            numbers |= {f"{table} of {name}": value for name, value in getattr(self, table).items()}
        for name, value in numbers.items():
            is_time = name.endswith("_us")
            if value is None and name in _MAY_LACK:
                continue
            if not isinstance(value, int | float) or value < 0 or (value == 0 and not is_time):
                raise ConfigError(f"{name} of a device profile must be a number above 0: got {shown(value)}.")
        if "fp32" not in self.tflops:
            raise ConfigError(f"tflops of a device profile need at least fp32: got {dict(self.tflops)}.")
        if unknown := sorted(set(self.kernels) - set(KERNELS)):
            raise ConfigError(f"kernels of a device profile are {', '.join(KERNELS)}: got {shown(unknown[0])}.")

    @property
    def is_cpu(self) -> bool:
        """Whether ranks share the cores of a host."""
        return self.cores is not None

    def flops_per_s(self, precision: str) -> float:
        """Of matrix products in a format; of fp32 where the format is unknown."""
        return 1e12 * self.tflops.get(precision, self.tflops["fp32"])

    def link_bytes_per_s(self, span: int) -> float:
        """Of the slowest link in a group of ranks.

        Args:
            span: how far its first and its last rank are apart.
        """
        return _GIB * (self.host_gib_s if span < self.devices_per_host else self.network_gib_s)

    def sum_s(self, ring_bytes: float, span: int) -> float:
        """Time of a sum over ranks, or of one half of it: a scatter of the sums, or a gathering.

        Args:
            ring_bytes: that each rank sends in a ring.
            span: how far the first and the last rank are apart.
        """
        speed, begin_us = self.link_bytes_per_s(span), self.message_us if self.sum_us is None else self.sum_us
        if self.sum_gib_s is not None and span < self.devices_per_host:
            speed = _GIB * self.sum_gib_s
        return ring_bytes / speed + begin_us * 1e-6

    def to_json(self) -> str:
        """As JSON."""
        return json.dumps(asdict(self), indent=2)

    @classmethod
    def from_json(cls, text: str) -> "DeviceProfile":
        """The profile that :meth:`to_json` wrote.

        Raises:
            ConfigError: the text is no profile.
        """
        try:
            values: Any = parse_strictly(text)
            measured = tuple(UnitTimes.from_values(one) for one in values.pop("measured", ()))
            return cls(**values, measured=measured)
        except ConfigError:
            raise
        except (ValueError, TypeError, AttributeError, KeyError) as error:
            raise ConfigError(
                f"this is no device profile: {text_of(error)}. Write one with hybridpp profile."
            ) from error


_MAY_LACK = ("sum_us", "sum_gib_s", "update_gib_s")
_OTHERS = ("name", "tflops", "kernels", "measured", "cores", "sources")
KERNELS = ("pointwise", "attention", "attention_backward", "experts")

# Products reach about two thirds of an H100's data sheet, three quarters of an A100's, four fifths of an RTX 4090's.
DEVICES: Mapping[str, DeviceProfile] = {
    "h100": DeviceProfile(
        name="h100",
        memory_gib=80,
        tflops={"fp32": 50, "fp16": 640, "bf16": 640},
        memory_gib_s=2600,
        op_us=2.5,
        host_us=7,
        host_gib_s=370,
        network_gib_s=42,
    ),
    "a100": DeviceProfile(
        name="a100",
        memory_gib=80,
        tflops={"fp32": 17, "fp16": 235, "bf16": 235},
        memory_gib_s=1550,
        op_us=3,
        host_us=8,
        host_gib_s=230,
        network_gib_s=21,
    ),
    "rtx4090": DeviceProfile(
        name="rtx4090",
        memory_gib=24,
        tflops={"fp32": 55, "fp16": 135, "bf16": 135},
        memory_gib_s=830,
        op_us=3,
        host_us=7,
        host_gib_s=18,
        network_gib_s=1.1,
    ),
    "cpu": DeviceProfile(
        name="cpu",
        memory_gib=16,
        tflops={"fp32": 0.05, "fp16": 0.002, "bf16": 0.002},
        memory_gib_s=8,
        op_us=8,
        host_gib_s=2,
        network_gib_s=1,
        message_us=60,
        devices_per_host=1024,
        cores=2,
    ),
}
"""The devices that are known by name."""


def find_device(name: str, text: str | None = None) -> DeviceProfile:
    """A device by name, or from the text of a profile that was measured.

    Raises:
        ConfigError: there is none.
    """
    if text is not None:
        return DeviceProfile.from_json(text)
    if name not in DEVICES:
        raise ConfigError(
            f"--device must be one of {', '.join(DEVICES)}, or a file that hybridpp profile wrote: got {shown(name)}."
        )
    return DEVICES[name]


def with_links(device: DeviceProfile, links: str) -> DeviceProfile:
    """A device with other links, written as ``nvlink:8,ib:400``.

    ``nvlink:N`` (or ``pcie:N``): N devices of a host are linked; ``nvlink:N:G`` also says at how many GB/s one way.
    ``ib:R`` (or ``ethernet:R``): each device has R Gbit/s to other hosts.

    Raises:
        ConfigError: the text has another form.

    Example:
        >>> with_links(DEVICES["h100"], "nvlink:4,ib:200").devices_per_host
        4
    """
    for part in links.split(","):
        kind, *values = part.strip().split(":")
        try:
            numbers = [float(value) for value in values]
        except ValueError:
            numbers = []
        if not numbers or any(number <= 0 for number in numbers):
            raise _unknown_link(part)
        if kind in ("nvlink", "pcie") and len(numbers) <= 2 and numbers[0] == int(numbers[0]):
            device = replace(device, devices_per_host=int(numbers[0]))
            if len(numbers) == 2:
                device = replace(device, host_gib_s=numbers[1] * 1e9 / _GIB)
        elif kind in ("ib", "ethernet") and len(numbers) == 1:
            # Nine tenths of the line arrive.
            device = replace(device, network_gib_s=0.9 * numbers[0] / 8 * 1e9 / _GIB)
        else:
            raise _unknown_link(part)
    return device


def _unknown_link(part: str) -> ConfigError:
    return ConfigError(
        "--links are written as nvlink:8,ib:400: devices that a host links (and :GB/s), and Gbit/s of each device to "
        f"other hosts; pcie and ethernet mean the same: got {shown(part)}."
    )
