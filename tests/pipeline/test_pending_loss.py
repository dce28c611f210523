import copy
import io

import numpy
import pytest
import torch

from hybridpp.pipeline import PendingLoss


def pending(value=2.5):
    waits = []

    def wait():
        waits.append(value)
        return torch.tensor(value)

    return PendingLoss(wait, torch.device("cpu")), waits


def saved(loss):
    file = io.BytesIO()
    torch.save(loss, file)
    file.seek(0)
    return torch.load(file)


READS = {
    "item": lambda loss: loss.item(),
    "float": float,
    "tolist": lambda loss: loss.tolist(),
    "numpy": lambda loss: loss.numpy(),
    "an array": numpy.asarray,
    "cpu": lambda loss: loss.cpu(),
    "to": lambda loss: loss.to(torch.float64),
    "detach": lambda loss: loss.detach(),
    "clone": lambda loss: loss.clone(),
    "a sum": lambda loss: 0 + loss,
    "a running sum": lambda loss: torch.zeros(()).add_(loss),
    "stacked": lambda loss: torch.stack([loss, loss]).mean(),
    "a mean of a list": lambda loss: sum([loss, loss]) / 2,
    "formatted": lambda loss: float(f"{loss:.2f}"),
    "a deep copy": copy.deepcopy,
    "saved": saved,
    "an entry": lambda loss: torch.full((2,), 9.0).index_fill(0, torch.tensor([1]), loss)[1],
}


@pytest.mark.parametrize("read", READS.values(), ids=READS)
def test_it_is_its_value_and_waits_once(read):
    loss, waits = pending()
    assert waits == []
    for _ in range(2):
        found = read(loss)
        assert not isinstance(found, PendingLoss)
        assert float(found) == 2.5
    assert waits == [2.5]


@pytest.mark.parametrize("compare", [lambda loss: loss < 3, lambda loss: bool(loss), lambda loss: loss.isfinite()])
def test_comparisons_wait(compare):
    loss, waits = pending()
    assert compare(loss)
    assert waits == [2.5]


def test_its_kind_is_known_before():
    loss, waits = pending()
    assert isinstance(loss, torch.Tensor)
    assert (loss.shape, loss.dtype, loss.device.type, loss.dim(), loss.numel()) == ((), torch.float32, "cpu", 0, 1)
    assert (loss.size(), loss.requires_grad, loss.is_cuda, loss.ndim) == ((), False, False, 0)
    assert waits == []


def test_it_prints_its_value():
    assert repr(pending()[0]) == str(pending()[0]) == "tensor(2.5000)"


def test_writing_to_it_changes_its_value():
    loss, _ = pending()
    loss.mul_(2)
    assert loss.item() == 5.0
    loss += 1
    assert loss.item() == 6.0


def test_what_waiting_raises_is_raised_at_the_read():
    def wait():
        raise RuntimeError("the peer is gone")

    loss = PendingLoss(wait, torch.device("cpu"))
    with pytest.raises(RuntimeError, match="the peer is gone"):
        loss.item()


def test_operators_that_bypass_pythons_functions_wait_too():
    loss, waits = pending()
    assert torch.ops.aten.add.Tensor(loss, torch.tensor(1.0)).item() == 3.5
    assert waits == [2.5]
