import re
from dataclasses import replace

import pytest

from hybridpp.errors import ConfigError
from hybridpp.estimate import DEVICES, DeviceProfile, UnitTimes, find_device, with_links

TIMES = UnitTimes(
    key="k", names=("a",), begins=(0.0,), ends=(1.0,), gradients=(None,), loss=1.0, backward_end=3.0, end=3.0
)


def test_a_profile_survives_json():
    device = replace(DEVICES["cpu"], measured=(TIMES,))
    assert find_device("file", device.to_json()) == device


@pytest.mark.parametrize("text", ["", "{}", "[1]", '{"name": "x"}'])
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
