"""Steps on a pretend accelerator, in one process of their own: what would fail on a GPU, or wait for it."""

import pytest
import torch
from forked_jobs import run_young
from made_once import made_once
from support import ROOT

pytestmark = pytest.mark.timeout(300)  # of the first test, which starts the process


@pytest.fixture(scope="module")
def told(tmp_path_factory):
    """What tests/scripts/on_device.py finds, by case."""
    return made_once(tmp_path_factory, "on_device", lambda: run_on_device(tmp_path_factory.mktemp("on_device")))


def run_on_device(folder):
    """In a process that has run no backward pass: one that has knows its devices, and so do its forks."""
    job = run_young(ROOT / "tests/scripts/on_device.py", str(folder / "results.pt"), timeout_s=280)
    assert job.returncode == 0, job.stdout
    return torch.load(folder / "results.pt", weights_only=False)


ONE_WAIT = ["host_copy.py:read"]


def test_operations_on_two_devices_raise(told):
    assert told["mixed"].startswith("Expected all tensors to be on the same device: aten.add.Tensor got DeviceTensor")


@pytest.mark.parametrize(("case", "tolerance"), [("pp", 1e-4), ("host batch", 1e-6)])
def test_a_step_mixes_no_devices_and_gives_the_cpus_losses(told, case, tolerance):
    expected, _ = told["expected"]
    assert told[case]["computes"] > 300, "it ran on the device"
    for losses in told[case]["losses"]:
        assert losses == pytest.approx(expected, abs=tolerance)


@pytest.mark.parametrize("case", ["dp", "zero"])
def test_replicas_on_a_device_give_the_cpus_losses(told, case):
    _, expected = told["expected"]
    means = [sum(losses) / 2 for losses in zip(*told[case]["losses"], strict=True)]
    assert means == pytest.approx(expected, abs=1e-3), "in bf16"


@pytest.mark.parametrize("case", ["pp", "dp", "zero"])
def test_a_step_with_a_batch_on_the_device_waits_for_its_items_and_losses(told, case):
    """With the digest of the batch, and with losses and norms; who computes losses counts labels before."""
    counted = ["loss_items.py:numbers", *ONE_WAIT]
    assert told[case]["waits"] == [ONE_WAIT if case == "pp" else counted, counted]


def test_a_step_with_a_batch_of_host_memory_waits_only_for_the_losses(told):
    assert told["host batch"]["waits"] == [[], ONE_WAIT]


def test_flags_of_parameters_that_no_replica_reached_take_no_wait_more(told):
    assert told["unreached"] == [ONE_WAIT] * 2


def test_items_of_a_batch_on_the_device_are_counted_in_one_wait_more(told):
    """For all micro-batches together: each one's weight is needed before its backward pass."""
    assert told["counted"] == ["batch.py:_numbers", *ONE_WAIT]


def test_a_batch_on_the_device_that_differs_is_refused_behind_the_step(told):
    text = "the ranks of one pipeline must hold the same batch: ranks 0, 1 hold different ones. "
    assert told["other batch"].startswith(text)
    assert told["other batch"].endswith(" True"), "the step changed no weight"


def test_the_search_for_a_plan_finds_what_it_finds_on_the_cpu(told):
    """On a device, autograd has one thread for all in-process ranks, of which one would wait for the others in it."""
    on_cpu, on_device = told["search"]
    assert on_device["parameters"] == on_cpu["parameters"]
    # Transformers itself looks for packed sequences, on the host.
    for own, *others in on_device["waits"]:
        assert own.startswith("staged_model.py:")
        assert others == ONE_WAIT
    assert on_device["losses"] == pytest.approx(on_cpu["losses"], abs=1e-6)


@pytest.mark.parametrize("case", range(2))
def test_masters_and_moments_lie_in_host_memory_and_change_no_bit(told, case):
    for nothing, part in zip(*told["offloaded"][case], strict=True):
        total = nothing["updated"]["gpusim"]
        assert nothing["updated"]["cpu"] == 0
        assert 0.3 * total < part["updated"]["cpu"] < 0.8 * total
        assert part["updated"]["cpu"] + part["updated"]["gpusim"] == total
        assert part["moments beside"]
        assert part["weights"] == ["gpusim"]
        assert [part[key] for key in ("losses", "bits", "skipped")] == [
            nothing[key] for key in ("losses", "bits", "skipped")
        ]
