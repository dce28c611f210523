import sys
from types import ModuleType

import pytest
import torch

from hybridpp.doctor import packages
from hybridpp.doctor.packages import build_versions, is_older, package_versions, torchvision_error


def test_versions_of_what_is_installed_are_found(monkeypatch):
    found = package_versions()
    assert found["torch"] == torch.__version__
    assert {"python", "transformers"} <= set(found)

    def none(name):
        raise packages.PackageNotFoundError(name)

    # A host to which everything was copied.
    monkeypatch.setattr(packages, "version", none)
    assert set(package_versions()) == {"python", "torch"}


def test_builds_are_named():
    assert build_versions() == {"cuda": torch.version.cuda or "", "nccl": build_versions()["nccl"], "gloo": "built in"}


@pytest.mark.parametrize(
    ("found", "oldest", "is_below"),
    [
        ("2.10.9", "2.11", True),
        ("2.11.0+cu130", "2.11", False),
        ("2.11", "2.11", False),
        ("0.21.0", "0.21.1", True),
        ("5.17.0.dev0", "5.17", False),
        ("10.0", "9.1", False),
    ],
)
def test_versions_are_compared_by_number(found, oldest, is_below):
    assert is_older(found, oldest) is is_below


def test_a_torchvision_that_cannot_be_imported_is_told_in_a_line(monkeypatch):
    def fail(name):
        raise RuntimeError("operator torchvision::nms does not exist\nmore")

    monkeypatch.setattr(packages, "find_spec", lambda name: None)
    assert torchvision_error() == ""
    monkeypatch.setattr(packages, "find_spec", lambda name: object())
    monkeypatch.setitem(sys.modules, "torchvision", ModuleType("torchvision"))
    assert torchvision_error() == ""
    monkeypatch.setattr(packages.importlib, "import_module", fail)
    assert torchvision_error() == "RuntimeError: operator torchvision::nms does not exist"
