import tomllib

import pytest
from doctor.facts import FACTS, facts, told
from support import ROOT

from hybridpp.doctor.package_problems import package_problems
from hybridpp.doctor.packages import OLDEST

DRIVER = {"nvidia_driver": "470.82"}


def test_the_lower_bounds_are_those_of_the_project():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    bounds = [requirement.replace("[vision]", "").split(">=") for requirement in project["dependencies"]]
    assert dict(bounds) == OLDEST


def test_an_installation_at_the_lower_bounds_has_no_problem():
    assert list(package_problems(FACTS)) == []


@pytest.mark.parametrize(
    ("name", "found"), [("torch", "2.10.1+cu128"), ("transformers", "4.57.0"), ("typer", "0.21.0")]
)
def test_a_package_below_its_bound_is_an_error(name, found):
    problems = list(package_problems(facts(versions={**FACTS.versions, name: found})))
    assert told(problems) == [("error", f"{name} must be {OLDEST[name]} or newer: got {found}.")]
    assert problems[0].way_out == f"Run pip install --upgrade '{name}>={OLDEST[name]}'."


def test_a_package_that_is_missing_is_a_hint():
    versions = {name: found for name, found in FACTS.versions.items() if name != "rich"}
    assert told(package_problems(facts(versions=versions))) == [("hint", "rich is not installed.")]


def test_a_torchvision_for_another_torch_is_an_error():
    versions = {**FACTS.versions, "torchvision": "0.28.0"}
    text = "RuntimeError: operator torchvision::nms does not exist"
    (found,) = package_problems(facts(versions=versions, torchvision=text))
    assert found.level == "error"
    assert found.what == (
        "torchvision 0.28.0 cannot be imported beside torch 2.11, and transformers imports it for models of images: "
        f"{text}."
    )


@pytest.mark.parametrize(
    ("builds", "environment", "level", "text"),
    [
        ({}, {}, "error", "this host has an NVIDIA driver (470.82), and torch 2.11 was built for the CPU"),
        ({"cuda": "13.0"}, {}, "error", "torch was built for CUDA 13.0 and finds no device beside the NVIDIA driver"),
        ({"cuda": "13.0"}, {"CUDA_VISIBLE_DEVICES": ""}, "warning", "this host has an NVIDIA driver, and CUDA_VISIBLE"),
    ],
)
def test_a_driver_without_devices_is_told(builds, environment, level, text):
    one = facts(
        host=DRIVER,
        builds={**FACTS.builds, **builds},
        environment={**FACTS.environment, **environment},
        no_device="old",
    )
    (found,) = package_problems(one)
    assert found.level == level
    assert found.what.startswith(text)


def test_a_torch_without_gloo_is_an_error():
    assert [problem.level for problem in package_problems(facts(builds={**FACTS.builds, "gloo": ""}))] == ["error"]
