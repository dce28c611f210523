import re
from dataclasses import replace
from pathlib import Path

import pytest

from hybridpp.errors import ConfigError
from hybridpp.estimate import DEVICES, DeviceProfile, UnitTimes, find_device, with_links
from hybridpp.estimate.devices import KERNELS

TIMES = UnitTimes(
    key="k", names=("a",), begins=(0.0,), ends=(1.0,), gradients=(None,), loss=1.0, backward_end=3.0, end=3.0
)


def test_a_profile_survives_json():
    device = replace(DEVICES["cpu"], measured=(TIMES,))
    assert find_device("file", device.to_json()) == device


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"kernels": {"norm": 1.0}}, "kernels of a device profile are pointwise, attention, .*: got 'norm'"),
        ({"kernels": {"attention": 0}}, "kernels of attention of a device profile must be a number above 0: got 0."),
        ({"tflops": {"bf16": 1.0}}, "tflops of a device profile need at least fp32"),
    ],
)
def test_rates_of_a_device_are_checked(values, message):
    with pytest.raises(ConfigError, match=message):
        replace(DEVICES["h100"], **values)


def test_the_example_of_a_device_file_is_one_and_names_its_sources():
    path = Path(__file__).parents[2] / "examples/devices/h100_fused.json"
    device = find_device(str(path), path.read_text())
    assert set(device.kernels) == set(KERNELS)
    assert set(device.sources) == {"tflops", "memory_gib_s", "host_gib_s", "network_gib_s", "kernels"}


H100 = DEVICES["h100"].to_json()


@pytest.mark.parametrize("text", ["", "{}", "[1]", '{"name": "x"}', H100.replace("{", '{"name": "x", ', 1)])
def test_what_is_no_profile_is_refused(text):
    with pytest.raises(ConfigError, match="this is no device profile"):
        DeviceProfile.from_json(text)


def test_unknown_devices_are_refused_with_the_known_ones():
    with pytest.raises(ConfigError, match="h100, a100, rtx4090, cpu, or a file that hybridpp profile wrote: got 'tpu'"):
        find_device("tpu")


def test_links_say_how_many_devices_a_host_links_and_how_fast():
    device = with_links(DEVICES["h100"], "nvlink:4:100,ib:200")
    assert device.devices_per_host == 4
    assert device.link_bytes_per_s(3) == pytest.approx(100e9)
    assert device.link_bytes_per_s(4) == pytest.approx(0.9 * 25e9)


@pytest.mark.parametrize("links", ["nvlink", "ib:0", "nvlink:x", "wifi:3", "nvlink:1.5", "ib:1:2"])
def test_links_in_another_form_are_refused(links):
    with pytest.raises(ConfigError, match=re.escape("--links are written as nvlink:8,ib:400")):
        with_links(DEVICES["h100"], links)
